"""One voice and one exit code from several processes; what each of them leaves behind is in covey.exits."""

from __future__ import annotations

import os
import re
import signal
from glob import escape, glob
from typing import TYPE_CHECKING

from covey import exits
from covey.checks.launch import launch_problems
from covey.cli.signals import CODES
from covey.exits import is_first, leave, leave_early
from covey.meeting import EXIT_FILE

if TYPE_CHECKING:
    from covey.cli.ending import Ending

__all__ = ["EXIT_FILE", "exit_code", "is_first", "last_start", "leave", "leave_early", "left_code", "speaks"]


def speaks(*, is_of_all: bool = False) -> bool:
    """Return whether this process prints errors: rank 0, another one where rank 0 has nothing to say, or one
    that no launcher has given a rank that could be believed.

    `is_of_all`: every rank raises it, as a guard's stop.
    """
    return bool(launch_problems(os.environ)) or exits.speaks(is_of_all=is_of_all)


def exit_code(path: str, returncode: int, ending: Ending) -> int:
    """Return the exit code of a launched run.

    `path` is the file of the first rank here (`left_code`), `returncode` the launcher's. 130 and 143 that a
    rank left mean that the run saved for a signal, whichever machine got it. Where no rank left a code there
    was nothing to save yet, or the ranks were killed. A second Ctrl-C asks for no save.
    """
    left = left_code(path)
    if ending.is_hurried:
        return left if left is not None and left in CODES.values() else CODES[signal.SIGINT]
    if left is None:
        are_killed = returncode not in {0, *CODES.values(), *(-number for number in CODES)}
        if ending.received and not are_killed:
            return CODES[signal.Signals(ending.received[0])]
        return int(returncode != 0)
    return 1 if left == 0 and returncode != 0 else left


def left_code(path: str) -> int | None:
    """Return the exit code that the first rank here has left in a file, with a number behind it for each time
    that torchrun has started the ranks again: that of the last start; None where none has left one."""
    starts = [name for name in glob(f"{escape(path)}*") if _start_of(name, path) is not None]
    if not starts:
        return None
    with open(max(starts, key=lambda name: _start_of(name, path) or 0), encoding="ascii") as file:
        return int(file.read())


def last_start(path: str) -> str:
    """Return what the directory of the ranks' last start has behind its name (`covey.meeting`)."""
    ranks = os.path.join(os.path.dirname(path), "ranks")
    numbers = [n for name in glob(f"{escape(ranks)}*") if (n := _start_of(name, ranks)) is not None]
    return f".{number}" if (number := max(numbers, default=0)) else ""


def _start_of(name: str, path: str) -> int | None:
    """Which start of the ranks left a file; None of a file that no start has finished."""
    number = re.fullmatch(r"(?:\.(\d+))?", name.removeprefix(path))
    return int(number[1] or 0) if number is not None else None
