"""Processes with vLLM's classes of models that see images, with torchvision or without it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_STAND_IN = Path(__file__).parent / "without_torchvision"


def image_paths() -> list[str]:
    """Return what such a process finds modules in."""
    further = [] if importlib.util.find_spec("torchvision") is not None else [str(_STAND_IN)]
    return [*further, *(path for path in sys.path if path)]


def image_environment() -> dict[str, str]:
    """Return the environment of such a process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(image_paths())}
