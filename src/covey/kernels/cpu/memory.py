"""How a process on a CPU gets and keeps memory."""

from __future__ import annotations

import ctypes
import platform

# mallopt(3) of the GNU C library, and what it is set to in bytes.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = (-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)


def keep_freed_memory() -> None:
    """Have freed memory used again before more is asked of the system.

    Otherwise memory of tensors of a few MiB goes back to the system and comes again, filled with zeros, many
    times a step. Blocks of 32 MiB and more still go back at once. Elsewhere than on the GNU C library nothing
    changes.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for parameter, value in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD):
            library.mallopt(parameter, value)
