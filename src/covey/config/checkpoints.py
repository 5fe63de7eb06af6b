"""The checkpoints of a run by the names of their directories; nothing in them is read."""

from __future__ import annotations

import re
from os.path import isdir
from pathlib import Path

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step: `checkpoint_name(40)` is "checkpoint-40"."""
    return f"checkpoint-{step}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in a directory name, or None where the name is not that of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the directories called `checkpoint-<step>`, oldest step first, whole or not."""
    try:
        steps = {path: checkpoint_step(path.name) for path in output_dir.iterdir() if isdir(path)}
    except (OSError, ValueError):  # there is no such directory, or it cannot be read
        return []
    return [path for _, path in sorted((step, path) for path, step in steps.items() if step is not None)]


def checkpoints_around(path: Path) -> list[Path]:
    """Return the checkpoints of the run that a path is the directory of, or would be a checkpoint of."""
    return list_checkpoints(path) or (
        list_checkpoints(path.parent) if checkpoint_step(path.name) is not None else []
    )
