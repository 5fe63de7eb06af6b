"""A run from its first check to its last line: `covey train` is `train` here."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.checks.batch import batch_plan
from covey.checks.judge import refuse_faults
from covey.checks.survey import Survey, fetch_model, model_dir, survey
from covey.comm import Comm
from covey.config.resolve import Resolved
from covey.errors import CoveyError, GuardStop
from covey.meeting import remember_run
from covey.models.live import lent
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.words import coded, sentence
from covey.telemetry.owner import Lock
from covey.telemetry.plot import plot_rewards
from covey.telemetry.trackers.factory import PATIENCE_S
from covey.telemetry.trackers.factory import start as start_trackers
from covey.texts import tr
from covey.training.agreement import refuse_differences
from covey.training.announce import closing, not_in_files, opening, slow_attention, why_padded
from covey.training.build import build_job
from covey.training.hooks import Hooks
from covey.training.job import Job
from covey.training.loop import run
from covey.training.out_of_memory import explain_memory
from covey.training.owning import owned
from covey.training.places import refuse_apart, refuse_places
from covey.training.process import (
    SIGNAL_CODES,
    compute_dtype,
    handlers,
    keep_segments,
    long_lived,
    ranks,
    world_size,
)
from covey.training.recorder import Recorder
from covey.training.stopping import stop as save_stopped
from covey.training.together import Together, together
from covey.training.watch import watched
from covey.types import Problem

# What trackers get where other processes wait to hear of an error, and after a second Ctrl-C.
HURRY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and where its files are; `checkpoint` is the best one where that was asked for."""

    exit_code: int
    output_dir: Path
    step: int
    total_steps: int
    checkpoint: Path


def train(
    resolved: Resolved,
    found: Survey | None = None,
    others: Together | None = None,
    hooks: Hooks | None = None,
) -> Outcome:
    """Check, build and run.

    ConfigError carries every problem, and nothing is written before the checks pass. `found` is what a caller
    has surveyed for this configuration already, `others` the processes that it watches since it began,
    and `hooks` what a program is told of the run.
    """
    with ExitStack() as stack:
        world = world_size()
        others = others or stack.enter_context(together())
        if found is None:
            found = stack.enter_context(survey(resolved.config, world))
        problems = refuse_faults(resolved, found.facts)
        fetch_model(resolved.config)
        output = Path(resolved.config.output_dir)
        layout = found.facts.layout
        if found.facts.machine.cuda and layout.engine == "colocate" and layout.engine_sleeps:
            keep_segments()
        others.explain = partial(explain_memory, resolved, found.facts, others)
        comm = stack.enter_context(ranks(world, output, others.activity, others.machines))
        lock = _begin_together(stack, resolved, found, comm, others)
        if found.live is not None:
            stack.enter_context(lent(found.live.model))
        job = build_job(resolved, found, comm, lock, hooks)
        stack.callback(job.close)
        if found.live is not None:
            stack.push(partial(_give_back, job, found.live.model))
        recorder = job.recorder
        if recorder.console is not None:
            stack.enter_context(recorder.console)
        batch = batch_plan(resolved.config, world, found.facts.prompts.num_used)
        recorder.say(*opening(resolved.config, found.facts, batch, job, problems))
        report_layout(job)
        _record_start(found.facts, problems, job)
        _start_trackers(resolved.config, job, others)
        signals = job.limits.signals
        stack.enter_context(handlers(signals, comm.activity, owns_process=others.owns_process))
        stack.enter_context(others.passing_signals(signals))
        exit_code = _run_to_end(job)
        verb = "rlhf" if any(p.code == "W113" for p in resolved.problems) else "train"
        recorder.say(*closing(job, verb, is_command=others.owns_process))
        recorder.say(*_not_in_files(resolved.config, found))
        recorder.say(*(_rounded_update(job, resolved.config) if found.live is not None else []))
        if recorder.files is not None and job.progress.step:
            _plot(recorder)
    best = job.saver.best_path if resolved.config.load_best_model_at_end else None
    return Outcome(
        exit_code=exit_code,
        output_dir=job.saver.output_dir,
        step=job.progress.step,
        total_steps=job.limits.total_steps,
        checkpoint=best or job.saver.path(job.progress.step),
    )


def _run_to_end(job: Job) -> int:
    """Run, and close the trackers however that ends; the exit code. Collective."""
    exit_code, patience_s = 1, PATIENCE_S
    try:
        with long_lived():
            run(job)
        agreed = job.limits.signals.agreed
        exit_code = SIGNAL_CODES.get(signal.Signals(agreed), 1) if agreed else 0
        _close_trackers(job, exit_code, patience_s)
        # The first rank may still be writing or sending: the others watch it until it is done.
        job.comm.gather_json(None)
        return exit_code
    except GuardStop as stop:
        exit_code = 3
        save_stopped(job, stop)
        raise
    except BaseException as error:
        if job.comm.world > 1 or not isinstance(error, Exception):
            patience_s = HURRY_S
        raise
    finally:
        _close_trackers(job, exit_code, patience_s)


def _close_trackers(job: Job, exit_code: int, patience_s: float) -> None:
    activity, trackers = job.comm.activity, job.recorder.trackers
    if trackers is None:
        return
    activity.is_interruptible = True
    try:
        trackers.close(exit_code, patience_s=patience_s, progress=activity.advance)
    finally:
        activity.is_interruptible = False


def _begin_together(
    stack: ExitStack, resolved: Resolved, found: Survey, comm: Comm, others: Together
) -> Lock | None:
    """Agree with the other ranks, own the run directory, and watch each other from here on. Collective."""
    config, output = resolved.config, Path(resolved.config.output_dir)
    refuse_differences(config, found, comm)
    refuse_places(found.facts.layout, comm, others.machines)
    lock = stack.enter_context(owned(config, found.facts.output, comm))
    if others.machines is not None:
        refuse_apart(output, comm, others.machines)
    remember_run(output)
    others.output_dir, others.lock = output, lock
    stack.enter_context(others.ending())
    stack.enter_context(watched(comm, config, output, lock, may_exit=others.may_exit))
    return lock


def _give_back(job: Job, model: nn.Module, kind: type[BaseException] | None, *error: Any) -> None:
    """Have the model of the program hold what was trained, where the run has not failed: then it stays as it
    was given, and the checkpoints have the rest."""
    if kind is None and (job.backend.policy.adapter is None or job.hooks.adds_adapter):
        job.backend.give_back(model)


def _rounded_update(job: Job, config: Config) -> list[str]:
    """What is said where the update of an adapter is added in a dtype that rounds most of it away."""
    policy = job.backend.policy
    if (
        policy.adapter is None
        or not job.hooks.adds_adapter
        or compute_dtype(config, policy.device) == torch.float32
    ):
        return []
    return [
        tr("object    the update of the adapter is added to the model in bfloat16, which rounds small"),
        tr("          changes away; `covey export CHECKPOINT --merge --torch_dtype float32` keeps them"),
    ]


def _not_in_files(config: Config, found: Survey) -> list[str]:
    live = found.live
    assert found.codec is not None
    return not_in_files(config, found.codec, model_dir(config) if live is None else live.directory)


def _record_start(facts: Facts, problems: Sequence[Problem], job: Job) -> None:
    """Put on record that the processes were started again, what is switched off, which rewards were
    changed, which records are missing, and which checkpoints were passed over."""
    said = [
        (problem.code, problem.seen)
        for problem in problems
        if problem.code in ("W153", "W162", "W163", "W164")
    ]
    said += [
        ("W160", reason)
        for reason in (facts.output.resume.skipped if facts.output.resume is not None else ())
    ]
    for code, seen in said:
        job.recorder.event("finding", step=job.progress.step, code=code, seen=seen)


def _plot(recorder: Recorder) -> None:
    """Plot the reward; a run that has ended well does not fail for a picture."""
    assert recorder.files is not None
    output = recorder.files.output_dir
    try:
        plot_rewards(recorder.files.metrics_path, output / "reward.png", title=output.name)
    except (OSError, ValueError, CoveyError) as error:
        recorder.say(tr("plot      no reward.png: {error}", error=error))


def report_layout(job: Job) -> None:
    """Say where the model needs a slower layout or slower attention than others."""
    if job.backend.policy.stream == "padded":
        seen = why_padded(job.backend.policy)
        job.recorder.event("finding", step=job.progress.step, code="F105", seen=seen)
    slow = slow_attention(job.backend.sampler)
    if slow:
        job.recorder.say(*coded("W175", sentence(slow)))
        job.recorder.event("finding", step=job.progress.step, code="W175", seen=slow)


def _start_trackers(config: Config, job: Job, others: Together) -> None:
    recorder = job.recorder
    if recorder.files is None or set(config.report_to) <= {"none"}:
        return

    def event(kind: str, **fields: str) -> None:
        recorder.event("finding", step=job.progress.step, code="F109", **fields)

    recorder.trackers = start_trackers(
        config.report_to,
        run_name=config.run_name or job.saver.output_dir.name,
        output_dir=job.saver.output_dir,
        config=config.model_dump(),
        say=lambda text: recorder.say(tr("tracker   {text}", text=text)),
        event=event,
        may_exit=others.owns_process,
    )
    # torchrun ends this process half a minute after another one of the run has failed.
    others.closing.append(partial(recorder.trackers.close, 1, patience_s=HURRY_S))
