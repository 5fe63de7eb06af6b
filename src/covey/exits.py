"""How one of several processes ends, so that the run has one exit code.

torchrun ends with 1 whatever its processes end with, and prints a long report when one of them fails. So the
process of rank 0 leaves its exit code in a file that the launching process reads, and endings that every
rank agrees on (a configuration at fault, a guard) look like success to torchrun.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn

EXIT_FILE = "COVEY_EXIT_FILE"
"""The environment variable with the file that rank 0 writes its exit code to."""

GUARDED = 3
_AGREED = (0, 2, GUARDED)
_PATIENCE_S = 10.0
_POLL_S = 0.05


def is_first() -> bool:
    """Return whether this is the only process or the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> int:
    """Return what this process exits with, once its own code is left for the process that launched it."""
    path = os.environ.get(EXIT_FILE)
    if path is None:
        return code
    if is_first():
        _write(path, code)
        return 0 if code in _AGREED else code
    return 0 if code in _AGREED and (code == 0 or first_has_ended()) else code


def leave_stuck(*, leads: bool, all_leave: bool) -> NoReturn:
    """End this process as stopped by a guard while its main thread is stuck; nothing is cleaned up.

    `leads`: this process speaks for all of them. Where not every rank leaves by itself, torchrun has to see a
    failure, for it ends the others then.
    """
    path = os.environ.get(EXIT_FILE)
    if path is not None and leads:
        _write(path, GUARDED)
    os._exit(0 if path is not None and all_leave else GUARDED)


def first_has_ended() -> bool:
    """Return whether rank 0 has left its exit code, or does so within ten seconds."""
    path = os.environ[EXIT_FILE]
    until = time.monotonic() + _PATIENCE_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _write(path: str, code: int) -> None:
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(str(code))
    os.replace(path + ".part", path)
