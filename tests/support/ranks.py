"""The ranks of a run as torchrun keeps them, without its seconds: forks that find everything imported.

As with torchrun the others are told to end as soon as one has failed, and killed where they do not. What a
run says, how it exits and which processes it leaves is what `covey train --nproc_per_node N` does; that the
command itself does so too is held by a few tests that call it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from covey.cli.ending import Ending
from covey.cli.ranks import exit_code
from covey.meeting import EXIT_FILE
from support import processes

# torchrun waits 30 s; a process that is stopped does not hear.
_KILL_AFTER_S = 8.0
MARK = "COVEY_TESTMARK"


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code, what its processes wrote, the seconds from the first one that failed
    to the last one's end, and the processes that are still there."""

    code: int
    said: str
    seconds: float
    left: list[int]


def run_ranks(file: str, *arguments: object, folder: Path, world: int = 2, limit_s: float = 90) -> Ended:
    """Run a file as the program of each rank, in `folder`."""
    processes._begin()
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="covey-") as work:
        exit_file, port = f"{work}/exit", processes._free_port()
        started: list[BaseProcess] = []
        for rank in range(world):
            own = {**processes._rank(rank, world, port), EXIT_FILE: exit_file, MARK: mark}
            given = [file, *map(str, arguments)], own, str(folder), f"{work}/said-{rank}"
            started.append(processes._CONTEXT.Process(target=processes._run, args=given))
            started[-1].start()
        failed_at = _wait(started, time.monotonic() + limit_s)
        seconds = time.monotonic() - failed_at
        codes = [process.exitcode or 0 for process in started]
        code = exit_code(exit_file, max(map(abs, codes)), Ending(Path(work)))
        said = "".join(path.read_text() for path in sorted(Path(work).glob("said-*")))
    return Ended(code, said, seconds, left(mark))


def _wait(started: Sequence[BaseProcess], end: float) -> float:
    """Wait for all, as torchrun does; when the first of them failed, or the last ended."""
    failed_at: float | None = None
    while any(process.exitcode is None for process in started):
        now = time.monotonic()
        assert now < end, "the run does not end"
        if failed_at is None and any(process.exitcode for process in started):
            failed_at = now
            for process in started:
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, signal.SIGTERM)
        if failed_at is not None and now - failed_at > _KILL_AFTER_S:
            for process in started:
                process.kill()
        time.sleep(0.02)
    return failed_at or time.monotonic()


def left(mark: str, patience_s: float = 2.0) -> list[int]:
    """The processes of a run that are there so long after its end."""
    until = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[int]:
    """The processes of a run."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found
