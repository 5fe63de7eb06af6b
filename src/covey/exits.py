"""How one of several processes ends, so that the run has one exit code.

torchrun ends with 1 whatever its processes end with, and prints a long report when one of them fails. So
the first process of a machine leaves its exit code in a file that the launching process reads, and endings
that every rank agrees on (a configuration at fault, a guard, a save for a signal) look like success to
torchrun, which starts no process again for them. What the processes know of each other is in covey.meeting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from covey.meeting import RAISED, SPOKE, Meeting, exit_file, forget_run, is_last_start, meeting, started

LAUNCHER = "COVEY_LAUNCHER"
"""The environment variable with the number of the launching process and when it started."""

AT_FAULT, GUARDED = 2, 3
RESTARTED = ("F131", "F133", "F134", "F136")
"""What may not come again where the processes are started again: one of them failed, is gone or stopped."""

# After a signal a run ends with the signal's code once it has saved.
_AGREED = (0, AT_FAULT, GUARDED, 130, 143)
_PATIENCE_S = 10.0
# A first rank that saves a large model before it comes to a guard's words.
_PATIENCE_OF_ALL_S = 30 * 60.0
_COMING_S = 1.0
_POLL_S = 0.05
_FOLLOW_S = 0.5
# prctl(2): the signal that this process gets when its parent ends.
_PDEATHSIG = 1


def is_first() -> bool:
    """Return whether this is the only process or the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def is_first_here() -> bool:
    """Return whether this is the first process of the run on its machine."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("RANK", "0")) == "0"


def leave(code: int) -> int:
    """Return what this process exits with, once its own code is left for the process that launched it and the
    other ranks know that it ends by itself."""
    place = meeting()
    has_spoken = place is not None and place.has(place.rank, SPOKE)
    if place is not None:
        place.go()
    if code in _AGREED or is_last_start():
        forget_run()
    path = exit_file()
    if path is None:
        return code
    if is_first_here():
        write_code(path, code)
        return 0 if code in _AGREED else code
    if has_spoken:
        write_code(path, code)
        return code
    return 0 if code in _AGREED and (code == 0 or _first_has_ended(path, place)) else code


def leave_early(code: int) -> int:
    """Return what this process exits with where a signal ends it without a save. No code is left: the
    launching process knows which signals it got."""
    place = meeting()
    if place is not None:
        place.go()
    forget_run()
    return code


def leave_stuck(*, leads: bool, all_leave: bool) -> NoReturn:
    """End this process as stopped by a guard while its main thread is stuck; nothing is cleaned up.

    Where not every rank leaves by itself, torchrun has to see a failure, for it ends the others then.
    """
    # For the launching process of this machine; `leads` holds on one machine alone.
    leave_code(GUARDED)
    end_now(GUARDED, leads=leads, all_leave=all_leave, may_restart=True)


def leave_code(code: int) -> None:
    """Leave the exit code of the run for the process that launched it; the first one that is left counts."""
    path = exit_file()
    if path is not None:
        with contextlib.suppress(OSError):
            write_code(path, code)


def end_now(code: int, *, leads: bool, all_leave: bool, may_restart: bool = False) -> NoReturn:
    """End this process because one of the run cannot go on; nothing is cleaned up.

    `leads`: this process speaks for all of them. Where all leave by themselves torchrun, whose report would
    say nothing new, hears of a success; the launching process reads the code. Where the processes may be
    started again, and torchrun is to do so, it hears of the failure.
    """
    if leads:
        leave_code(code)
    if is_last_start():
        forget_run()
    place = meeting()
    if place is not None:
        place.go()
    starts_again = may_restart and not is_last_start()
    os._exit(0 if all_leave and not starts_again and exit_file() is not None else code)


def interrupt_thread(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread, by its ident, at its next step of Python."""
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    interrupt.argtypes = (ctypes.c_ulong, ctypes.py_object)
    interrupt(thread, KeyboardInterrupt)


def speaks(*, is_of_all: bool) -> bool:
    """Return whether this process says why it ends: the lowest rank that has to.

    `is_of_all`: every rank raises it, however long the first one takes to come to it, as it saves before.
    """
    place = meeting()
    if place is not None and not place.has(place.rank, RAISED):
        place.put(RAISED)
    if place is None or place.rank == 0:
        return is_first()
    path = exit_file()
    is_launched = path is not None
    began = time.monotonic()
    while not any(place.has(rank, RAISED) for rank in range(place.rank)):
        if path is not None and os.path.exists(path):
            return False
        waited = time.monotonic() - began
        is_there = any(place.state(rank) == "here" for rank in range(place.rank))
        if not is_there and not is_launched and waited >= min(_COMING_S, _PATIENCE_S):
            # Nobody has heard of a lower rank, or it has ended with words of its own; those of another
            # machine do not have this error.
            return is_first_here() or any(place.state(rank) == "gone" for rank in range(place.rank))
        if waited >= (_PATIENCE_OF_ALL_S if is_of_all and is_there else _PATIENCE_S):
            place.put(SPOKE)
            return True
        time.sleep(_POLL_S)
    return False


def launcher_words() -> str:
    """This process as the ones that it launches know it: its number, and when it started."""
    return f"{os.getpid()} {started(os.getpid())}"


def follow_launcher() -> None:
    """End this process soon after the one that launched it, however that ended: by kill -9, say.

    torchrun is in between. On Linux the system ends this process with it; a thread watches the launching one
    and then ends torchrun, and so all of its processes.
    """
    place = meeting()
    if place is not None:
        place.come()
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


def _first_has_ended(path: str, place: Meeting | None) -> bool:
    """Whether the first process of this machine has left its exit code, or does so within ten seconds of its
    last sign: it may wait for trackers."""
    until = time.monotonic() + _PATIENCE_S
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK") or "0")
    while not os.path.exists(path):
        if place is not None and place.state(first) == "here":
            until = time.monotonic() + _PATIENCE_S
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def write_code(path: str, code: int) -> None:
    """Write an exit code to a file as a whole; one that is there already stays."""
    if os.path.exists(path):
        return
    part = f"{path}.{os.getpid()}.part"
    with open(part, "w", encoding="ascii") as file:
        file.write(str(code))
    os.replace(part, path)
