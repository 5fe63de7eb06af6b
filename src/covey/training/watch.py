"""The watchdog of a run: what it knows of this process, and how the run ends where it is stuck."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.comm import Comm
from covey.exits import leave_stuck
from covey.health.record import fields_of
from covey.health.watchdog import Watchdog, Watched, allowances, flush_output
from covey.options.schema import Config
from covey.telemetry.files import RunFiles
from covey.training.failure import text_of
from covey.training.process import gpu_memory, nccl_trace
from covey.types import Finding


@contextmanager
def watched(comm: Comm, config: Config, output_dir: Path) -> Iterator[None]:
    """Watch this process from the loading of the model to the end of the run."""

    def report(finding: Finding) -> None:
        # The first rank's own thread, or, where that process is stopped, the first one that still runs. A
        # directory in which nothing has been written stays free for the next start.
        if (output_dir / "config.yaml").is_file():
            RunFiles(output_dir).append_event("finding", step=finding.step, **fields_of(finding))
        # The terminal's lock may be with the main thread.
        os.write(2, ("\n".join(text_of(finding)) + "\n").encode())

    def leave(leads: bool, all_leave: bool) -> None:
        flush_output()
        leave_stuck(leads=leads, all_leave=all_leave)

    watchdog = Watchdog(
        Watched(
            activity=comm.activity,
            output_dir=output_dir,
            rank=comm.rank,
            world=comm.world,
            allowances=allowances(config.reward_timeout_s),
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
