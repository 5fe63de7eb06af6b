"""`child.py WORK`: one rank of a run that is ended in the middle of a write, or whose disk fails there.

WORK/opts.json are the options, WORK/fault.json what happens: `act` ("kill", "ENOSPC", "EIO", or "limit" for
a largest size of files) on `rank`, in the `save`-th checkpoint of this process at the `at`-th step of the
writer. A step of the writer is a call to the system: a file opened, begun, half written or put on the disk, a
directory made, a rename, a removal. How a run ended is in WORK/outcome-RANK.json.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.config.resolve import from_dict
from covey.errors import ConfigError, CoveyError, RunFailed
from covey.training import saving
from covey.training.process import world_size
from covey.training.run import train

# The writes of a file that are steps of their own, by their number.
_WRITES = (1, 20)


class Steps:
    """Counts the steps of the writers of one process, and acts at one of them."""

    def __init__(self, fault: dict[str, Any], trace: Path) -> None:
        self.fault, self.trace = fault, trace
        self.saves = self.steps = 0
        self.is_writing = False

    def step(self, what: str) -> None:
        if not self.is_writing:
            return
        self.steps += 1
        with open(self.trace, "a", encoding="utf-8") as file:
            file.write(f"{self.saves} {self.steps} {what}\n")
        if (self.saves, self.steps) == (self.fault.get("save"), self.fault.get("at")):
            self.act(self.fault["act"])

    def act(self, act: str) -> None:
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, act), os.strerror(getattr(errno, act)))


class File:
    """A file that is being written, whose writes are steps."""

    def __init__(self, file: Any, steps: Steps, name: str) -> None:
        self._file, self._steps, self._name, self._writes = file, steps, name, 0

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._writes += 1
        if self._writes in _WRITES:
            # Half of it is in the file when the process ends there.
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._steps.step(f"write {self._name}")
            self._file.write(data[len(data) // 2 :])
            return len(data)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def watch(steps: Steps) -> None:
    """Make the calls of the writers steps."""

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            steps.step(f"{name} {args[0] if args else ''}")
            return real(*args, **kwargs)

        setattr(owner, name, call)

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
        counted(owner, name)
    open_path = Path.open

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not steps.is_writing or "w" not in mode:
            return open_path(self, mode, *args, **kwargs)
        steps.step(f"open {self.name}")
        return File(open_path(self, mode, *args, **kwargs), steps, self.name)

    Path.open = opened  # type: ignore[method-assign]
    saving.write_checkpoint = _within(steps, saving.write_checkpoint, begins=True)
    saving.retain = _within(steps, saving.retain, begins=False)


def _within(steps: Steps, real: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if begins:
            steps.saves, steps.steps = steps.saves + 1, 0
            if steps.fault.get("act") == "limit" and steps.saves == steps.fault["save"]:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (steps.fault["at"], resource.RLIM_INFINITY))
        steps.is_writing = True
        try:
            return real(*args, **kwargs)
        finally:
            steps.is_writing = False

    return call


def main(work: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    fault = json.loads((work / "fault.json").read_text())
    steps = Steps(fault if fault.get("rank", 0) == rank else {}, work / f"steps-{rank}.txt")
    if fault:
        watch(steps)
    outcome: dict[str, Any] = {"error": None}
    try:
        done = train(from_dict(json.loads((work / "opts.json").read_text()), world_size()))
        outcome["step"] = done.step
    except RunFailed as error:
        outcome["error"] = error.finding.code
    except ConfigError as error:
        outcome["error"] = ", ".join(f"{p.code}: {p.seen}" for p in error.problems)
    except CoveyError as error:
        outcome["error"] = str(error)
    (work / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    sys.exit(3 if outcome["error"] else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
