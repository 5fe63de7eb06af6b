"""The library in C as it is compiled for other processors that this one can be."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from covey.models.native.library import open_library


def processors() -> tuple[str, ...]:
    """This one, and by the width of their vectors those with AVX2 and with SSE alone, where it has AVX2."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    return ("native", *(("haswell", "x86-64-v2") if "avx2" in flags else ()))


def library_for(processor: str, folder: Path) -> ctypes.CDLL:
    """What a user of such a processor has; compiled in `folder` for any but this one."""
    with pytest.MonkeyPatch.context() as patched:
        if processor != "native":
            script = folder / "cc"
            compiler = os.environ.get("CC") or "cc"
            script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -march={processor}\n')
            script.chmod(0o700)
            patched.setenv("CC", str(script))
            patched.setenv("XDG_CACHE_HOME", str(folder))
        found = open_library()
    assert found is not None, "these tests need a C compiler"
    return found
