"""Compiles the C files beside it for this machine's processor, once, and opens the result.

A machine without a compiler does without: every caller has a way in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from os.path import isfile
from pathlib import Path
from typing import Any

from torch import Tensor

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_HERE = Path(__file__).parent
_OF_TWO_DTYPES = ("step.c", "step_bfloat16.c", "blocks.c", "blocks_bfloat16.c")
_SOURCES = (*_OF_TWO_DTYPES, "attention.c")
_HEADERS = ("products.h", "tiles.h", "attention.h")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
_LIMIT_S = 60


def structure(name: str, **fields: Any) -> Any:
    """A C structure; fields are pointers, numbers or structures."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin; a null pointer for none."""
    return None if tensor is None else tensor.data_ptr()


def open_library() -> ctypes.CDLL | None:
    """The compiled library; None where no C compiler is or it cannot compile for this processor.

    It is kept in the user's cache folder under a name that follows from sources, compiler and processor. Only
    a file of this user is opened.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None or platform.system() != "Linux":
        return None
    try:
        path = _folder() / f"{_digest(compiler)}.so"
        if not isfile(path):
            _compile(compiler, path)
        if path.stat().st_uid != os.getuid():
            return None
        return _opened(path)
    except (OSError, subprocess.SubprocessError):
        return None


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.attention_scratch.restype = INT
    return library


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "covey" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _digest(compiler: str) -> str:
    digest = hashlib.sha256()
    for name in (*_HEADERS, *_SOURCES):
        digest.update((_HERE / name).read_bytes())
    # The compiler as a file and not its version: asking for that would start a process with each run.
    found = Path(compiler).resolve()
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    lasting = [line for line in processor if line.startswith(("model", "flags", "Features", "CPU"))]
    digest.update(repr((found, found.stat().st_mtime_ns, _FLAGS, lasting)).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Write `path` whole or not at all, as other processes may want it too."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, *(str(_HERE / name) for name in _SOURCES), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
        made.replace(path)
