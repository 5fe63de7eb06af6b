"""Directories on their way in and out: durable writes, hidden names, and what a killed run left behind."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from os.path import exists, isdir, islink
from pathlib import Path

from covey.checkpoint.manifest import MANIFEST, TRAINER, Manifest, read_manifest, render_manifest
from covey.config.checkpoints import checkpoint_step
from covey.errors import CheckpointError

_HIDDEN = re.compile(r"\.(tmp|old|del)-(checkpoint-[0-9]+)-[0-9a-f]+")


def hidden_sibling(directory: Path, kind: str, name: str) -> Path:
    """Return an unused path beside the checkpoints.

    `kind` is "tmp" for one that is being written, "old" for one that is being replaced, "del" for one that is
    being deleted: `hidden_sibling(run, "tmp", "checkpoint-40")` is like ".tmp-checkpoint-40-9f3a1c2b".
    """
    return directory / f".{kind}-{name}-{secrets.token_hex(4)}"


def sync_file(path: Path) -> None:
    """Ask the operating system to put a file's bytes on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Ask the operating system to put a directory's entries on the disk."""
    sync_file(path)


def store_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write manifest.json so that at every moment either the former or the new one is there, whole."""
    temporary = checkpoint / f".{MANIFEST}.tmp"
    try:
        temporary.write_text(render_manifest(manifest), encoding="utf-8")
        sync_file(temporary)
        os.replace(temporary, checkpoint / MANIFEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(checkpoint)


def tidy(directory: Path) -> list[Path]:
    """Finish or undo what a killed process left half done, and return the paths that were touched.

    Half-written and half-deleted checkpoints are removed; one that was set aside for a replacement that never
    came goes back to its place; a checkpoint whose manifest already says "model only" loses the rest of its
    trainer directory. Only the one process that writes checkpoints here may call it.
    """
    touched: list[Path] = []
    if not isdir(directory):
        return touched
    for path in sorted(directory.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match:
            home = directory / match[2]
            if match[1] == "old" and not exists(home):
                os.rename(path, home)
            elif isdir(path) and not islink(path):
                shutil.rmtree(path)
            else:
                # Whatever it is, no checkpoint of ours: those are directories.
                continue
            touched.append(path)
        elif checkpoint_step(path.name) is not None and isdir(path) and not islink(path):
            touched.extend(_tidy_checkpoint(path))
    return touched


def _tidy_checkpoint(checkpoint: Path) -> list[Path]:
    leftovers = [path for path in (checkpoint / f".{MANIFEST}.tmp",) if exists(path)]
    for path in leftovers:
        path.unlink()
    trainer = checkpoint / TRAINER
    if isdir(trainer):
        try:
            keeps_trainer = read_manifest(checkpoint).trainer
        except CheckpointError:
            # Not ours to judge here: whoever verifies it says what is wrong with it.
            return leftovers
        if not keeps_trainer:
            shutil.rmtree(trainer)
            leftovers.append(trainer)
    return leftovers
