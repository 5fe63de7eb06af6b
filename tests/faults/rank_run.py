"""`python rank_run.py FAULT PHASE RANK WORDS…`: `covey` in one rank of a run, with a fault planted in one of
them.

The fault comes when that rank enters a phase for the third time, writes its third rollout, is given its first
completion, or in the middle of its second checkpoint.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from covey.activity import Activity
from covey.checkpoint import write
from covey.checks import survey as surveys
from covey.checks.survey import Survey
from covey.cli.main import main
from covey.rollout.single_turns import SingleTurns
from covey.telemetry.rollout_log import RolloutLog
from covey.training import agreement, build, process, together
from support.checks import changed

VISIT = 3
SAVE = 2


def happen(fault: str) -> None:
    """What happens to the process."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "memory":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
            "which 3.10 GiB is free. Including non-PyTorch memory, this process has 76.04 GiB memory in use."
        )
    if fault == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/rollouts/a-file")
    if fault == "raise":
        raise ValueError("a fault of this rank alone")


def before(owner: Any, name: str, fault: str, call: int = 1) -> None:
    """Let the fault happen before a call of a function."""
    real, calls = getattr(owner, name), 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            happen(fault)
        return real(*args, **kwargs)

    setattr(owner, name, planted)


def on_entering(phase: str, fault: str) -> None:
    """Let the fault happen in a phase, at its third visit."""
    real: Callable[[Activity, str], None] = Activity.enter
    visits = 0

    def enter(self: Activity, entered: str) -> None:
        nonlocal visits
        real(self, entered)
        visits += entered == phase
        if entered == phase and visits == VISIT:
            visits += 1
            happen(fault)

    Activity.enter = enter  # type: ignore[method-assign]


def other_version() -> None:
    """This rank finds another version of a package."""
    real = agreement._packages
    agreement._packages = lambda versions: {**real(versions), "transformers": "5.17.0"}


def refuse_data() -> None:
    """This rank alone cannot read the data."""
    real = surveys.survey

    def survey(*args: Any, **kwargs: Any) -> Survey:
        found = real(*args, **kwargs)
        return replace(found, facts=changed(found.facts, data={"missing_paths": ("d.jsonl",)}))

    surveys.survey = survey


def plant(fault: str, phase: str) -> None:
    """Plant the fault in this process."""
    if fault == "version":
        other_version()
    elif fault == "data":
        refuse_data()
    elif phase == "process group":
        before(process, "_make_process_group", fault)
    elif phase == "load":
        before(build, "backend_for", fault)
    elif phase == "record":
        before(RolloutLog, "write", fault, VISIT)
    elif phase == "completion":
        before(SingleTurns, "_episode", fault)
    elif phase == "save":
        before(write, "_sealed", fault, SAVE)
    else:
        on_entering(phase, fault)


if __name__ == "__main__":
    fault, phase, rank = sys.argv[1:4]
    together.STOPPED_S = float(os.environ.get("COVEY_TEST_STOPPED_S", "2.0"))
    if os.environ["RANK"] == rank:
        plant(fault, phase)
    sys.exit(main(sys.argv[4:]))
