"""How a run ends when a guard stops it: the finding is recorded, and the run is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from covey.errors import GuardStop
from covey.health.saved import Saved, possible
from covey.health.words import REPORT
from covey.training.job import Job
from covey.types import Finding


def stop(job: Job, stopped: GuardStop) -> None:
    """Record what a guard found, and save a checkpoint. Collective.

    `stopped` gets the checkpoint from which the run can be resumed, and its advice names no other. Weights
    that are not finite are not saved, and the records say so.
    """
    if not job.buffer.rows:
        # Nothing is learned from a rollout that was refused; the run that goes on collects it again.
        job.source.take_back(job.progress.rollout)
    code, unsaved, step = stopped.finding.code, _unsaved(job), job.progress.step
    if unsaved is None and not job.saver.options.save_only_model:
        stopped.checkpoint = job.saver.path(step)
    stopped.finding = _advised(job, stopped.finding, stopped.checkpoint)
    job.recorder.finding(stopped.finding, step=step)
    if unsaved is None:
        job.saver.save(step)
    elif unsaved.code != code:
        job.recorder.finding(_advised(job, unsaved, None), step=step)


def _unsaved(job: Job) -> Finding | None:
    """Why the weights of this step must not be saved."""
    try:
        if job.saver.saved_step != job.progress.step:
            job.saver.check(job.progress.step)
    except GuardStop as stop:
        return stop.finding
    return None


def _advised(job: Job, finding: Finding, coming: Path | None) -> Finding:
    """The finding; the checkpoints in its advice exist, or are `coming`, which is saved next."""
    step, history = job.progress.step, job.health.rules.history
    saved = list(history.saved())
    if coming is not None:
        saved.append(Saved(step=step, path=coming, resumes=True))
    open_fixes = history.changing(finding.fixes) or (REPORT,)
    fixes = possible(open_fixes, saved, finding.step or step, history.slower())
    return replace(finding, fixes=fixes)
