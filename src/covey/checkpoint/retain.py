"""Retention: which checkpoints stay, and which keep more than the model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from os.path import islink
from pathlib import Path
from typing import Literal

from covey.checkpoint.manifest import TRAINER, Manifest, read_manifest
from covey.checkpoint.read import verify, verify_sizes
from covey.checkpoint.staging import hidden_sibling, store_manifest, sync_directory, tidy
from covey.config.checkpoints import list_checkpoints
from covey.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What was deleted: a whole checkpoint, or the trainer directory of one."""

    path: Path
    step: int
    kind: Literal["checkpoint", "trainer"]
    freed_bytes: int


def retain(
    output_dir: Path,
    *,
    total_limit: int | None,
    keep_trainer_state: int,
    protected: Collection[Path],
    written: Path | None = None,
) -> list[Deletion]:
    """Delete what the limits no longer cover and return it, oldest first.

    The newest `total_limit` checkpoints that are whole stay (None: all), and so do protected ones; of those
    that stay, all but the newest `keep_trainer_state` are reduced to the model. The one just `written` always
    stays; its sums are those of the bytes that were written, so it is not read again. Without it the newest
    is verified first, and if it does not verify no checkpoint is touched. Of older ones files and lengths are
    compared, not contents. One that lacks a part within the limits, that has no readable manifest, or that is
    a link is neither counted nor deleted: its files may be all that somebody has.
    """
    tidy(output_dir)
    paths = [path for path in list_checkpoints(output_dir) if not islink(path)]
    if not paths:
        return []
    newest = written or paths[-1]
    try:
        verified = verify(newest) if written is None else verify_sizes(written)
    except CheckpointError:
        return []
    safe = {path.resolve() for path in protected} | {newest.resolve()}
    deletions: list[Deletion] = []
    rank = 0
    for path in reversed(paths):
        # Files are looked at only as far as a limit still counts on them.
        must_verify = rank < (max(keep_trainer_state, 1) if total_limit is None else total_limit)
        manifest = verified if path == newest else _manifest(path, must_verify)
        if manifest is None:
            continue
        rank += 1
        if total_limit is not None and rank > total_limit and path.resolve() not in safe:
            deletions.append(_delete(path, manifest))
        elif manifest.trainer and rank > keep_trainer_state:
            deletions.append(_reduce(path, manifest))
    return deletions[::-1]


def _manifest(path: Path, must_verify: bool) -> Manifest | None:
    try:
        return verify_sizes(path) if must_verify else read_manifest(path)
    except CheckpointError:
        return None


def _delete(path: Path, manifest: Manifest) -> Deletion:
    # Renamed first, so that a kill half-way leaves a hidden rest and no half checkpoint.
    doomed = hidden_sibling(path.parent, "del", path.name)
    os.rename(path, doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed)
    return Deletion(path=path, step=manifest.step, kind="checkpoint", freed_bytes=manifest.size)


def _reduce(path: Path, manifest: Manifest) -> Deletion:
    # The manifest goes first: a kill in between leaves surplus files, which `tidy` knows how to finish.
    kept = {name: e for name, e in manifest.files.items() if not name.startswith(f"{TRAINER}/")}
    reduced = replace(manifest, trainer=False, files=kept)
    store_manifest(path, reduced)
    shutil.rmtree(path / TRAINER, ignore_errors=True)
    return Deletion(
        path=path / TRAINER, step=manifest.step, kind="trainer", freed_bytes=manifest.size - reduced.size
    )
