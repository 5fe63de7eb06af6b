"""ModelScope, through its own client; the one module that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.data.errors import DataError, ModelError, one_line
from covey.texts import tr


def dataset_directory(name: str, *, offline: bool) -> Path:
    """The files of a data set, fetched into ModelScope's cache."""
    try:
        return _snapshot(name, repo_type="dataset", local_files_only=offline)
    except ModelError as error:
        raise DataError(str(error), subject=name) from error


def model_directory(name: str, *, revision: str | None, allow_patterns: Sequence[str], offline: bool) -> Path:
    """The files of a model that match the patterns, fetched into ModelScope's cache."""
    return _snapshot(
        name,
        repo_type="model",
        revision=revision,
        allow_patterns=list(allow_patterns),
        local_files_only=offline,
    )


def _snapshot(name: str, **options: Any) -> Path:
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        words = tr(
            "{name}: ModelScope's client is not installed: pip install modelscope (or load it from Hugging "
            "Face: hf::{name})",
            name=name,
        )
        raise ModelError(words, subject=name) from error
    # The client's error classes differ from release to release.
    try:
        return Path(snapshot_download(name, **options))
    except Exception as error:
        where = tr("ModelScope's cache") if options["local_files_only"] else "ModelScope"
        raise ModelError(
            tr(
                "{name} could not be downloaded from {where}: {one_line}",
                name=name,
                where=where,
                one_line=one_line(error),
            ),
            subject=name,
        ) from error
