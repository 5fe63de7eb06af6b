"""`python failing_run.py FAULT RANK WORDS…`: `covey` with a fault planted in one rank, at its third update.

The command starts its processes with this file in the place of the module covey: the fault is in them.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from covey.cli import launch
from covey.cli.main import main

STEP = 3


def fail(fault: str) -> None:
    """What happens instead of the update."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(5)
    raise ValueError("a fault of this rank alone")


def plant(fault: str) -> None:
    """Replace what the fault is in, in this process alone."""
    from covey.training import loop

    update, count = loop.update, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == STEP and fault == "full":
            full()
        elif count == STEP:
            fail(fault)
        return update(*args, **kwargs)

    loop.update = failing


def full() -> None:
    """From here on nothing can be added to a file."""
    from covey.telemetry import files

    def append_line(path: Path, record: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    files.append_line = append_line


if __name__ == "__main__":
    fault, rank = sys.argv[1:3]
    if os.environ.get("RANK", "0" if "--nproc_per_node" not in sys.argv else "") == rank:
        plant(fault)
    own = launch.command

    def command(*args: Any) -> list[str]:
        words = own(*args)
        at = words.index("covey")
        return [*words[: at - 1], __file__, fault, rank, *words[at + 1 :]]

    launch.command = command
    sys.exit(main(sys.argv[3:]))
