"""What a process holds in memory, read from Linux's own files, and on a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path


def peak_bytes() -> int:
    """The most that this process has had resident. `ru_maxrss` would start at what its parent had."""
    return _status_bytes(os.getpid(), "VmHWM")


def gpu_peak_bytes() -> int:
    """The most that torch has held on the GPU; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def resident_bytes() -> int:
    """What this process has resident now."""
    return _status_bytes(os.getpid(), "VmRSS")


def children_peak_bytes() -> int:
    """The sum of the peaks of the processes that this one has started and that still run."""
    me = os.getpid()
    found = [int(n) for f in Path(f"/proc/{me}/task").glob("*/children") for n in f.read_text().split()]
    return sum(_status_bytes(child, "VmHWM") for child in found)


def _status_bytes(process: int, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
