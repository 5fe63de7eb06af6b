"""How one of several processes ends, so that the run has one exit code.

torchrun ends with 1 whatever its processes end with, and prints a long report when one of them fails. So the
process of rank 0 leaves its exit code in a file that the launching process reads, and endings that every
rank agrees on (a configuration at fault, a guard) look like success to torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

EXIT_FILE = "COVEY_EXIT_FILE"
"""The environment variable with the file that rank 0 writes its exit code to."""

LAUNCHER = "COVEY_LAUNCHER"
"""The environment variable with the number of the launching process and when it started."""

GUARDED = 3
_AGREED = (0, 2, GUARDED)
_PATIENCE_S = 10.0
_POLL_S = 0.05
_FOLLOW_S = 0.5
# prctl(2): the signal that this process gets when its parent ends.
_PDEATHSIG = 1


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

    Where not every rank leaves by itself, torchrun has to see a failure, for it ends the others then.
    """
    end_now(GUARDED, leads=leads, all_leave=all_leave)


def meeting_place(output_dir: Path) -> Path:
    """The directory in which the processes of a run leave each other files: that of the launching process, or
    one in the run directory."""
    path = os.environ.get(EXIT_FILE)
    return output_dir / ".covey-ranks" if path is None else Path(path).parent / "ranks"


def end_now(code: int, *, leads: bool, all_leave: bool) -> NoReturn:
    """End this process because one of the run cannot go on; nothing is cleaned up.

    `leads`: this process speaks for all of them. Where all leave by themselves torchrun, whose report would
    say nothing new, hears of a success; the launching process reads the code.
    """
    path = os.environ.get(EXIT_FILE)
    if path is not None and leads:
        with contextlib.suppress(OSError):
            _write(path, code)
    os._exit(0 if path is not None and all_leave else code)


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where it is not there, or has ended and
    is only waited for. Elsewhere than on Linux it is 0 for every process that is there."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in brackets may hold anything; the state is the first word behind it, the time the
            # 20th.
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[19]) if words[0] not in "ZX" else None


def launcher_words() -> str:
    """This process as the ones that it launches know it: its number, and when it started."""
    return f"{os.getpid()} {started(os.getpid())}"


def follow_launcher() -> None:
    """End this process soon after the one that launched it, however that ended: by kill -9, say.

    torchrun is in between. On Linux the system ends this process with it; a thread watches the launching one
    and then ends torchrun, and so all of its processes.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if LAUNCHER in os.environ:
        pid, start = os.environ[LAUNCHER].split()
        threading.Thread(target=_follow, args=(int(pid), start, parent), name="launcher", daemon=True).start()


def _follow(pid: int, start: str, parent: int) -> None:
    while str(started(pid)) == start:
        time.sleep(_FOLLOW_S)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


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
