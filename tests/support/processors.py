"""The library in C as it is compiled for other processors that this one can be."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from covey.kernels.cpu.library import open_library
from support.needs import need

WARNINGS = "-Wall -Wextra -Werror"


def flags() -> set[str]:
    """What Intel's and AMD's processors say that they can; nothing of others."""
    return set(Path("/proc/cpuinfo").read_text().split()) if platform.machine() == "x86_64" else set()


def processors() -> tuple[str, ...]:
    """This one, and by the width of their vectors those with AVX2 and with SSE alone, where it has AVX2."""
    return ("native", *(("haswell", "x86-64") if "avx2" in flags() else ()))


def library_for(processor: str, folders: pytest.TempPathFactory) -> ctypes.CDLL:
    """What a user of such a processor has.

    For any but this one it is compiled once for all tests, and a warning of the compiler is an error.
    """
    need("a C compiler")
    with pytest.MonkeyPatch.context() as patched:
        if processor != "native":
            base = folders.getbasetemp()
            # Processes that share the tests have folders side by side.
            folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / processor
            script = folder / "cc"
            if not script.is_file():
                _write_compiler(script, processor)
            patched.setenv("CC", str(script))
            patched.setenv("XDG_CACHE_HOME", str(folder))
        found = open_library()
    assert found is not None, "the C compiler fails, or warns of the code"
    return found


def _write_compiler(script: Path, processor: str) -> None:
    """Another process may do so at the same time: both write the same, and neither is read half done."""
    script.parent.mkdir(exist_ok=True)
    own = script.with_name(f"cc-{os.getpid()}")
    own.write_text(f'#!/bin/sh\nexec {os.environ.get("CC") or "cc"} "$@" -march={processor} {WARNINGS}\n')
    own.chmod(0o700)
    own.replace(script)
