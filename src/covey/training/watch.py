"""The watchdog of a run: what it knows of the job, and how the run ends where it is stuck."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from covey.exits import leave_stuck
from covey.health.record import fields_of
from covey.health.watchdog import Watchdog, Watched, allowances, flush_output
from covey.options.schema import Config
from covey.plan.words import coded, flags, sentence
from covey.telemetry.files import RunFiles
from covey.training.job import Job
from covey.training.process import gpu_memory, nccl_trace
from covey.types import Finding


@contextmanager
def watched(job: Job, config: Config) -> Iterator[None]:
    """Watch the job while it runs."""

    def report(finding: Finding) -> None:
        # The first rank's own thread, or, where that process is stopped, the first one that still runs.
        files = job.recorder.files or RunFiles(job.saver.output_dir)
        files.append_event("finding", step=finding.step, **fields_of(finding))
        # The terminal's lock may be with the main thread.
        os.write(2, ("\n".join(text_of(finding)) + "\n").encode())

    def leave(leads: bool, all_leave: bool) -> None:
        flush_output()
        leave_stuck(leads=leads, all_leave=all_leave)

    watchdog = Watchdog(
        Watched(
            activity=job.comm.activity,
            output_dir=job.saver.output_dir,
            rank=job.comm.rank,
            world=job.comm.world,
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


def text_of(finding: Finding) -> list[str]:
    """A finding in its four parts, as lines."""
    parts = [finding.seen, finding.why, finding.cause]
    lines = coded(finding.code, " ".join(sentence(p) for p in parts if p))
    for fix in finding.fixes:
        lines += coded("", sentence(fix.text))
        # In one line, so that it can be copied.
        lines += [f"{'':<10}{flags(fix.edits)}"] if fix.edits else []
    return lines
