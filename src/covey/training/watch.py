"""The watchdog of a run: what it knows of this process, and how the run ends where it is stuck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.comm import Comm
from covey.exits import leave_stuck
from covey.health.watchdog import Watchdog, Watched, allowances, flush_output
from covey.options.schema import Config
from covey.telemetry.owner import Lock
from covey.training.failure import record, say
from covey.training.process import gpu_memory, nccl_trace
from covey.types import Finding


@contextmanager
def watched(comm: Comm, config: Config, output_dir: Path, lock: Lock | None) -> Iterator[None]:
    """Watch this process from the loading of the model to the end of the run; the first rank has the lock."""

    def report(finding: Finding) -> None:
        # The first rank's own thread, or, where that process is stopped, the first one that still runs.
        record(finding, output_dir, lock)
        say(finding)

    def leave(leads: bool, all_leave: bool) -> None:
        flush_output()
        leave_stuck(leads=leads, all_leave=all_leave)

    watchdog = Watchdog(
        Watched(
            activity=comm.activity,
            output_dir=output_dir,
            rank=comm.rank,
            world=comm.world,
            allowances=allowances(
                config.reward_timeout_s, config.rollout_timeout if config.rollout_servers else 0.0
            ),
            report=report,
            leave=leave,
            memory=gpu_memory,
            collectives=nccl_trace,
        )
    )
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
