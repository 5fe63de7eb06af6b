"""What was measured, on what: processor, threads, versions, date."""

from __future__ import annotations

import ast
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from runs import NAMES, THREADS

_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "covey": ("covey", "torch", "transformers"),
    "trl": ("trl", "torch", "transformers"),
    "swift": ("ms-swift", "trl", "torch", "transformers"),
}


def facts(pythons: Mapping[str, str]) -> list[str]:
    """A list of what the figures depend on."""
    size = f"{os.cpu_count()} processors, {_memory_gb():.0f} GB"
    return [
        f"- machine: {platform.machine()}, {_processor()}, {size}",
        f"- threads: {THREADS} for each side; Python {platform.python_version()}",
        f"- date: {datetime.date.today().isoformat()}",
        *(f"- {NAMES[side]}: {_versions(python, side)}" for side, python in pythons.items()),
    ]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    has = [label for flag, label in (("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in flags]
    return " with ".join([names[0] if names else platform.processor(), *([" and ".join(has)] if has else [])])


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _versions(python: str, side: str) -> str:
    names = list(_PACKAGES[side])
    code = f"from importlib.metadata import version; print([version(name) for name in {names}])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout)
    return ", ".join(f"{name} {number}" for name, number in zip(names, found, strict=True))
