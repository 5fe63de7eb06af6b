"""The manifest: every file of a checkpoint with its size and SHA-256, written after all of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isdir, isfile, islink
from pathlib import Path
from typing import Any

from covey.checkpoint.exact import JSON
from covey.errors import CheckpointError
from covey.paths import cannot_be_read, trouble
from covey.texts import tr

FORMAT = 2
"""The format that is written. Format 1 had the optimizer's state in one file of one rank."""
_READ = (1, 2)
MANIFEST = "manifest.json"
TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file: its length in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself; `trainer` is False where only the model is kept.

    Models are alike in every `format`; a run goes on from the newest alone.
    """

    step: int
    trainer: bool
    meta: Mapping[str, JSON]
    files: Mapping[str, FileEntry]
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all listed files together."""
        return sum(entry.size for entry in self.files.values())


def render_manifest(manifest: Manifest) -> str:
    """Return the text of manifest.json, with a digest over all of its other fields.

    The files are guarded by their own sums; without the digest a changed step or meta field would pass
    unseen.
    """
    body: dict[str, Any] = {
        "format": manifest.format,
        "step": manifest.step,
        "trainer": manifest.trainer,
        "meta": dict(manifest.meta),
        "files": {name: {"size": e.size, "sha256": e.sha256} for name, e in sorted(manifest.files.items())},
    }
    body["digest"] = _digest(body)
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check manifest.json alone; the files that it lists are not touched."""
    path = checkpoint / MANIFEST
    try:
        if (found := trouble(path)) is not None:
            raise CheckpointError(tr("{path} {words}", path=path, words=found.words))
        if not isfile(path):
            raise CheckpointError(
                tr(
                    "{checkpoint} is not a complete checkpoint: it has no {manifest}",
                    checkpoint=checkpoint,
                    manifest=MANIFEST,
                )
            )
        body = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(tr("{path} cannot be read: {error}", path=path, error=error)) from error
    if not isinstance(body, dict) or "format" not in body:
        raise CheckpointError(tr("{path} is not a manifest: it does not name its format", path=path))
    if body["format"] not in _READ:
        raise CheckpointError(
            tr(
                "{path} has format {format!r}; this version of covey reads the formats {first} to {last}",
                path=path,
                format=body["format"],
                first=_READ[0],
                last=_READ[-1],
            )
        )
    if body.pop("digest", None) != _digest(body):
        raise CheckpointError(
            tr("{path} was changed after it was written: its own digest does not match", path=path)
        )
    try:
        files = {name: FileEntry(size=e["size"], sha256=e["sha256"]) for name, e in body["files"].items()}
        return Manifest(
            step=body["step"], trainer=body["trainer"], meta=body["meta"], files=files, format=body["format"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(tr("{path} is not a manifest: {error!r}", path=path, error=error)) from error


def require_states(checkpoint: Path, manifest: Manifest) -> None:
    """Raise CheckpointError where a run cannot go on from a checkpoint: it keeps the model only, or is of an
    older format."""
    if not manifest.trainer:
        raise CheckpointError(
            tr("{checkpoint} has only the model; a run cannot resume from it", checkpoint=checkpoint)
        )
    if manifest.format != FORMAT:
        raise CheckpointError(
            tr(
                "{checkpoint} has format {format}, but this version of covey resumes from format "
                "{current} only; resume with the version that wrote it, or start a new run: --model "
                "{checkpoint}",
                checkpoint=checkpoint,
                format=manifest.format,
                current=FORMAT,
            )
        )


def list_files(checkpoint: Path) -> dict[str, Path]:
    """Return every file below `checkpoint` by its relative path, without the manifest.

    Links and special files are refused: what they lead to can change without the checkpoint's knowing.
    """
    files: dict[str, Path] = {}

    def fail(error: OSError) -> None:
        raise CheckpointError(cannot_be_read(error)) from error

    for folder, directories, names in os.walk(checkpoint, onerror=fail):
        for name in (*directories, *names):
            path = Path(folder, name)
            relative = path.relative_to(checkpoint).as_posix()
            if islink(path) or not (isfile(path) or isdir(path)):
                raise CheckpointError(
                    tr(
                        "{checkpoint}: {relative} is a link or a special file",
                        checkpoint=checkpoint,
                        relative=relative,
                    )
                )
            if isfile(path) and relative != MANIFEST:
                files[relative] = path
    return dict(sorted(files.items()))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def export_target(checkpoint: Path, *, merge: bool) -> Path:
    """Where the export of a checkpoint goes when nobody says."""
    return checkpoint.with_name(f"{checkpoint.name}-{'merged' if merge else 'model'}")
