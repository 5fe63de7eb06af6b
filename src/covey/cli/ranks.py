"""One voice and one exit code from several processes.

torchrun ends with 1 whatever its processes end with, and prints a long report when one of them fails. So the
process of rank 0 leaves its exit code in a file that the launching process reads, and endings that every
rank agrees on (a configuration at fault, a guard) look like success to torchrun.
"""

from __future__ import annotations

import os
import time

EXIT_FILE = "COVEY_EXIT_FILE"
"""The environment variable with the file that rank 0 writes its exit code to."""

_AGREED = (0, 2, 3)
_PATIENCE_S = 10.0
_POLL_S = 0.05


def is_first() -> bool:
    """Return whether this is the only process or the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def speaks() -> bool:
    """Return whether this process prints errors: rank 0, or another one where rank 0 does not end by
    itself."""
    if is_first():
        return True
    return EXIT_FILE in os.environ and not _first_has_ended()


def leave(code: int) -> int:
    """Return what this process exits with, once its own code is left for the process that launched it."""
    path = os.environ.get(EXIT_FILE)
    if path is None:
        return code
    if is_first():
        with open(path + ".part", "w", encoding="ascii") as file:
            file.write(str(code))
        os.replace(path + ".part", path)
        return 0 if code in _AGREED else code
    return 0 if code in _AGREED and (code == 0 or _first_has_ended()) else code


def exit_code(path: str, returncode: int, received: set[int]) -> int:
    """Return the exit code of a launched run.

    `path` is the file of rank 0, `returncode` is torchrun's, `received` are the numbers (exit codes) of the
    signals that the launching process got. A rank that was terminated without such a signal was ended by
    torchrun because another one failed.
    """
    left: int | None = None
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            left = int(file.read())
    if left is None:
        return max(received) if received else int(returncode != 0)
    if left in (130, 143) and not received:
        return 1
    return 1 if left == 0 and returncode != 0 else left


def _first_has_ended() -> bool:
    path = os.environ[EXIT_FILE]
    until = time.monotonic() + _PATIENCE_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True
