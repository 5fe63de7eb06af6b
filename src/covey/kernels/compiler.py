"""Where torch's compiler and Triton make kernels."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from os.path import isfile
from pathlib import Path

import torch

# Compute capability of the oldest GPU that flex attention is compiled for with bfloat16.
_SINCE = (8, 0)


def has_compiler(device: torch.device) -> bool:
    """Whether kernels are compiled for a device: a GPU of NVIDIA's from Ampere on, and Triton is there with
    what it needs."""
    if device.type != "cuda" or not _has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= _SINCE


@functools.cache
def _has_triton() -> bool:
    """Whether Triton can build: it compiles a piece of C against Python's headers before its first kernel."""
    compilers = [os.environ.get("CC", ""), "clang", "gcc", "cc"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return (
        importlib.util.find_spec("triton") is not None
        and any(shutil.which(name) for name in compilers if name)
        and isfile(headers)
    )
