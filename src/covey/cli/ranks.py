"""One voice and one exit code from several processes; what each of them leaves behind is in covey.exits."""

from __future__ import annotations

import os

from covey import exits
from covey.exits import EXIT_FILE, is_first, leave
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
