"""One voice and one exit code from several processes; what each of them leaves behind is in covey.exits."""

from __future__ import annotations

import os
import re
from glob import escape, glob

from covey import exits
from covey.exits import is_first, leave
from covey.meeting import EXIT_FILE
from covey.plan.check_launch import launch_problems

__all__ = ["EXIT_FILE", "exit_code", "is_first", "leave", "speaks"]


def speaks(*, is_of_all: bool = False) -> bool:
    """Return whether this process prints errors: rank 0, another one where rank 0 has nothing to say, or one
    that no launcher has given a rank that could be believed.

    `is_of_all`: every rank raises it, as a guard's stop.
    """
    return bool(launch_problems(os.environ)) or exits.speaks(is_of_all=is_of_all)


def exit_code(path: str, returncode: int, received: set[int]) -> int:
    """Return the exit code of a launched run.

    `path` is the file of the first rank here, with a number behind it for each time that torchrun has
    started the ranks again; `returncode` is torchrun's, `received` are the numbers (exit codes) of the
    signals that the launching process got. A rank that was terminated without such a signal was ended by
    torchrun because another one failed.
    """
    left: int | None = None
    starts = [name for name in glob(f"{escape(path)}*") if _start_of(name, path) is not None]
    if starts:
        with open(max(starts, key=lambda name: _start_of(name, path) or 0), encoding="ascii") as file:
            left = int(file.read())
    if left is None:
        return max(received) if received else int(returncode != 0)
    if left in (130, 143) and not received:
        return 1
    return 1 if left == 0 and returncode != 0 else left


def _start_of(name: str, path: str) -> int | None:
    """Which start of the ranks left a file; None of a file that no start has finished."""
    number = re.fullmatch(r"(?:\.(\d+))?", name.removeprefix(path))
    return int(number[1] or 0) if number is not None else None
