"""The watchdog of a run: what it knows of this process, and how the run ends where it is stuck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from covey.comm import Comm
from covey.errors import GuardStop
from covey.exits import leave_stuck
from covey.health.watchdog import Watchdog, Watched, allowances, flush_output
from covey.options.schema import Config
from covey.telemetry.owner import Lock
from covey.texts import tr
from covey.training.failure import record, say
from covey.training.process import gpu_memory, interrupt, nccl_trace
from covey.types import Finding, Fix

_RESTART = Fix(
    text=tr(
        "covey has interrupted the call; if it does not return, restart the program, or the "
        "kernel of the notebook"
    )
)


@contextmanager
def watched(
    comm: Comm, config: Config, output_dir: Path, lock: Lock | None, *, may_exit: bool
) -> Iterator[None]:
    """Watch this process from the loading of the model to the end of the run; the first rank has the lock.

    A stuck process ends with exit code 3 where it `may_exit`. A program's own process goes on: its call is
    interrupted, and GuardStop (F301) is raised when that call returns.
    """
    stopped: list[Finding] = []

    def report(finding: Finding) -> None:
        # The first rank's own thread, or, where that process is stopped, the first one that still runs.
        if not may_exit:
            finding = replace(finding, fixes=(*finding.fixes, _RESTART))
            stopped.append(finding)
        record(finding, output_dir, lock)
        say(finding)

    def leave(leads: bool, all_leave: bool) -> None:
        if not may_exit:
            interrupt(comm.activity)
            return
        flush_output()
        leave_stuck(leads=leads, all_leave=all_leave)

    watchdog = Watchdog(
        Watched(
            activity=comm.activity,
            output_dir=output_dir,
            rank=comm.rank,
            world=comm.world,
            allowances=allowances(
                config.reward_timeout_s,
                config.rollout_timeout if config.rollout_servers else 0.0,
                by_function=config.rollout_func is not None,
            ),
            report=report,
            leave=leave,
            ends_hangs=config.watchdog,
            memory=gpu_memory,
            collectives=nccl_trace,
        )
    )
    watchdog.start()
    try:
        try:
            yield
        finally:
            watchdog.stop()
    except KeyboardInterrupt:
        if not stopped:
            raise
        raise GuardStop(stopped[-1]) from None
