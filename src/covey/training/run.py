"""Wiring: the one file that turns a configuration into the parts of a run."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from covey.checkpoint.read import read_states
from covey.checkpoint.registry import Registry, Stateful
from covey.comm import Comm
from covey.config.resolve import Resolved
from covey.config.schema import Config
from covey.config.write import to_yaml
from covey.data.order import Order
from covey.data.pass_rates import levels
from covey.errors import CoveyError, GuardStop
from covey.health.rewards import RewardWatch
from covey.health.rules import Rules
from covey.health.weights import WeightWatch
from covey.learner.backends.base import Backend
from covey.learner.reference import MovingReference
from covey.models.dropout import dropouts
from covey.models.load import choose_stream, save_policy
from covey.models.policy import Policy
from covey.plan.batch import BatchPlan, batch_plan
from covey.plan.check_pass_rates import is_reordered
from covey.plan.check_steps import step_refusals
from covey.plan.checks import refuse_faults
from covey.plan.facts import Facts
from covey.plan.report import report_json
from covey.plan.words import coded, sentence
from covey.rewards.registry import build, metric_names
from covey.rollout.collect import CollectPlan
from covey.rollout.engine import Engine
from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles, delete_run
from covey.telemetry.owner import Lock
from covey.telemetry.plot import plot_rewards
from covey.telemetry.rollouts import RolloutLimits
from covey.telemetry.trackers.factory import start as start_trackers
from covey.training import settings
from covey.training.announce import closing, opening, slow_attention
from covey.training.backend import backend_for, engine_for
from covey.training.evaluate import Best, EvalPrompts, Evaluator
from covey.training.facts import Survey, fetch_model, model_dir, survey
from covey.training.failure import writing
from covey.training.guards import Guards
from covey.training.job import Job
from covey.training.loop import run
from covey.training.objective import Objective
from covey.training.owning import owned
from covey.training.process import (
    SIGNAL_CODES,
    handlers,
    keep_freed_memory,
    long_lived,
    own_device,
    ranks,
    world_size,
)
from covey.training.recorder import Recorder
from covey.training.saving import SavePlan, Saver
from covey.training.scoring import Scoring, step_tokens
from covey.training.select import FURTHER, Further, OneByOne, Replay, SelectingSource
from covey.training.source import (
    LiveSource,
    PromptSupply,
    ReplaySource,
    Source,
    StreamSupply,
    TableSupply,
    upcoming,
)
from covey.training.state import (
    Health,
    OptimizerState,
    Progress,
    RandomState,
    ReferenceState,
    RolloutBuffer,
    check_place,
)
from covey.training.together import together
from covey.training.watch import watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and where its files are; `checkpoint` is the best one where that was asked for."""

    exit_code: int
    output_dir: Path
    step: int
    total_steps: int
    checkpoint: Path


def train(resolved: Resolved, found: Survey | None = None) -> Outcome:
    """Check, build and run.

    ConfigError carries every problem, and nothing is written before the checks pass. `found` is what a caller
    has surveyed for this configuration already.
    """
    with ExitStack() as stack:
        world = world_size()
        if found is None:
            found = stack.enter_context(survey(resolved.config, world))
        problems = refuse_faults(resolved, found.facts)
        fetch_model(resolved.config)
        output = Path(resolved.config.output_dir)
        comm = stack.enter_context(ranks(world, output))
        lock = stack.enter_context(owned(resolved.config, found.facts, comm))
        others = stack.enter_context(together(comm, output, lock))
        job = build_job(resolved, found, comm, lock)
        stack.callback(job.backend.close)
        others.signals = job.signals
        recorder = job.recorder
        if recorder.console is not None:
            stack.enter_context(recorder.console)
        batch = batch_plan(resolved.config, world, found.facts.num_prompts)
        recorder.say(*opening(resolved.config, found.facts, batch, job, problems))
        _report_layout(job)
        _record_skipped(found.facts, job)
        _start_trackers(resolved.config, job)
        exit_code = 1
        if recorder.trackers is not None:
            others.closing.append(partial(recorder.trackers.close, 1))
        try:
            stack.enter_context(handlers(job.signals, comm.activity))
            with watched(job, resolved.config), long_lived():
                run(job)
            exit_code = SIGNAL_CODES.get(signal.Signals(job.signals.agreed), 1) if job.signals.agreed else 0
        except GuardStop as stop:
            exit_code = 3
            job.stop(stop.finding)
            raise
        finally:
            if recorder.trackers is not None:
                recorder.trackers.close(exit_code)
        recorder.say(*closing(job, "train"))
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


def _record_skipped(facts: Facts, job: Job) -> None:
    """Put on record which checkpoints were passed over."""
    if facts.resume is None:
        return
    for reason in facts.resume.skipped:
        job.recorder.event("finding", step=job.progress.step, code="W160", seen=reason)


def _plot(recorder: Recorder) -> None:
    """Plot the reward; a run that has ended well does not fail for a picture."""
    assert recorder.files is not None
    output = recorder.files.output_dir
    try:
        plot_rewards(recorder.files.metrics_path, output / "reward.png", title=output.name)
    except (OSError, ValueError, CoveyError) as error:
        recorder.say(f"plot      no reward.png: {error}")


def build_job(resolved: Resolved, found: Survey, comm: Comm, lock: Lock | None = None) -> Job:
    """Every part of a run, wired and, where it resumes, restored."""
    config, facts = resolved.config, found.facts
    assert found.codec is not None
    resume = None if facts.resume is None else Path(facts.resume.path)
    plan = batch_plan(config, comm.world, facts.num_prompts)
    needs = settings.needs(config, plan.steps_per_rollout)
    device = own_device()
    keep_freed_memory(device)
    backend = backend_for(config, facts, device, comm, reference=needs.reference)
    policy = backend.policy
    choose_stream(policy, config.attn_impl)
    engine = engine_for(config, facts, policy)
    supply = _supply(config, found, plan)
    progress, buffer = Progress(upcoming(supply), may_differ=is_reordered(config, facts)), RolloutBuffer()
    best = Best(config.metric_for_best_model, greater_is_better=config.greater_is_better)
    scoring = _scoring(config, found, plan, progress)
    source = _source(config, found, supply, engine, backend, scoring, comm)
    total_steps = scoring.total_steps = _total_steps(plan, source)
    objective = settings.objective(config, total_steps)
    source = _selecting(_changing(source, objective, plan), config, found, objective)
    health = _health(config, plan, backend, comm, scoring.rewards.tasks)
    states = (progress, buffer, OptimizerState(backend), RandomState(comm), best, objective.bonus)
    registry = _registry(states, backend.moving, health, source)
    with writing(Path(config.output_dir), lock, 0):
        files = _files(resolved, plan, found) if comm.rank == 0 else None
    if resume is not None:
        _restore(registry, resume, progress, buffer, files)
    engine.publish(backend.named_weights(), progress.step)
    recorder = _recorder(config, files, total_steps, lock)
    return Job(
        source=source,
        engine=engine,
        backend=backend,
        scoring=scoring,
        objective=objective,
        needs=needs,
        schedule=settings.schedule(config, total_steps),
        pack_plan=settings.pack_plan(config, _longest_prompt(found, source), policy, comm),
        comm=comm,
        progress=progress,
        buffer=buffer,
        limits=settings.limits(config, total_steps),
        evaluator=_evaluator(config, found, engine, backend, scoring, comm),
        eval_times=settings.eval_times(config, plan),
        best=best,
        watch=health.watch,
        guards=health.guards,
        rules=health.rules,
        saver=Saver(
            plan=_save_plan(config, facts, policy, health.guards),
            output_dir=Path(config.output_dir),
            registry=registry,
            best=best,
            recorder=recorder,
            activity=comm.activity,
            saved_step=-1 if resume is None else progress.step,
        ),
        recorder=recorder,
    )


def _scoring(config: Config, found: Survey, plan: BatchPlan, progress: Progress) -> Scoring:
    assert found.codec is not None
    rewards, weights = found.rewards or build([]), settings.reward_weights(config)
    ends = step_tokens(found.codec, config.step_separator)
    return Scoring(rewards, weights, progress, plan.steps_per_epoch, ends)


def _health(
    config: Config, plan: BatchPlan, backend: Backend, comm: Comm, tasks: Mapping[str, Collection[str]]
) -> Health:
    guards = _guards(config, plan, backend, comm)
    watch = RewardWatch(comm.world, tasks)
    return Health(rules=Rules(config.model_dump()), watch=watch, guards=guards)


def _registry(
    components: Iterable[Stateful | None], moving: MovingReference | None, health: Health, source: Source
) -> Registry:
    """What a checkpoint keeps; None is of a component that the run does not have."""
    registry = Registry()
    for component in components:
        if component is not None:
            registry.register(component)
    if moving is not None:
        registry.register(ReferenceState(moving))
    registry.register(health, is_later=True)
    if isinstance(source, SelectingSource):
        registry.register(source, is_later=True)
    registry.expect(("progress", "rollout", "optimizer", "rng", "best", "health"))
    return registry


def _guards(config: Config, plan: BatchPlan, backend: Backend, comm: Comm) -> Guards:
    still = backend.reference if backend.moving is None else None
    policies = {"": backend.policy, "reference ": still}
    weights = [
        (f"{of}{n}", p) for of, m in policies.items() if m is not None for n, p in m.named_parameters()
    ]
    is_whole = backend.policy.adapter is None
    return Guards(
        step_refusals=step_refusals(config),
        untrained=tuple(n for n, p in backend.policy.named_parameters() if is_whole and not p.requires_grad),
        comm=comm,
        num_generations=config.num_generations,
        num_rows=plan.prompts_per_rollout * config.num_generations,
        peak_rate=config.learning_rate,
        scaled_by=settings.scaled_by(config),
        is_over_rollout=config.advantage_estimator == "reinforce_plus_plus",
        plain_loss=settings.plain_loss(config),
        is_comparable=settings.is_comparable(config),
        may_be_silent=settings.may_be_silent(config),
        has_dropout=not config.disable_dropout and bool(dropouts(backend.policy)),
        sync_every=0 if backend.moving is None else config.ref_model_sync_steps,
        is_low_precision=any(p.dtype != torch.float32 for _, p in weights),
        weights=WeightWatch(
            frozen={n: p for n, p in weights if not p.requires_grad},
            trained={n: p for n, p in weights if p.requires_grad},
            moving={} if backend.moving is None else backend.moving.tensors(),
        ),
    )


def _changing(source: Source, objective: Objective, plan: BatchPlan) -> Source:
    """The source at the temperature that each rollout has."""
    if not isinstance(source, LiveSource) or "temperature" not in objective.schedules:
        return source
    return replace(source, temperature=lambda n: objective.temperature_at(n * plan.steps_per_rollout))


def _selecting(source: Source, config: Config, found: Survey, objective: Objective) -> Source:
    """The source with groups without signal replaced, where that is asked for."""
    if not isinstance(source, LiveSource) or not (config.dynamic_sample or config.replay_buffer_size):
        return source
    seed = config.data_seed + FURTHER
    further: PromptSupply
    if found.stream is not None:
        further = StreamSupply(stream=found.stream.reordered(seed), per_rollout=1)
    else:
        assert found.prompts is not None
        further = OneByOne(found.prompts, seed)
    return SelectingSource(
        source,
        objective.credit,
        Further(further),
        Replay(config.replay_buffer_size, config.seed),
        attempts=config.max_resample_times if config.dynamic_sample else 0,
    )


def _restore(
    registry: Registry, resume: Path, progress: Progress, buffer: RolloutBuffer, files: RunFiles | None
) -> None:
    """Give every component its state back, and put aside what was recorded after it."""
    # A run that no longer selects goes on without what a selection would need.
    states = read_states(resume)
    kept = {n: s for n, s in states.items() if n in registry.names or n != SelectingSource.name}
    registry.load(kept)
    check_place(progress, buffer)
    if files is not None:
        # A rollout that is in the buffer has its file already.
        started = progress.rollout if buffer.rows else progress.rollout - 1
        files.supersede_after(progress.step, started)


def _recorder(config: Config, files: RunFiles | None, total_steps: int, lock: Lock | None) -> Recorder:
    """The sinks, which the first rank alone has."""
    return Recorder(
        files=files,
        lock=lock,
        console=Console(total_steps, config.logging_steps) if files is not None else None,
        every=config.logging_steps,
        total_steps=total_steps,
        num_shown=config.log_completions,
    )


def _supply(config: Config, found: Survey, plan: BatchPlan) -> TableSupply | StreamSupply | None:
    """Where prompts come from; None where rollouts are replayed."""
    if config.replay_rollouts is not None:
        return None
    if found.stream is not None:
        return StreamSupply(stream=found.stream, per_rollout=plan.prompts_per_rollout)
    assert found.prompts is not None
    order = Order(
        num_prompts=len(found.prompts.entries),
        per_rollout=plan.prompts_per_rollout,
        seed=config.data_seed,
        shuffle=config.dataset_shuffle,
        levels=levels(config.curriculum, found.prompts.entries),
    )
    return TableSupply(prompts=found.prompts, order=order)


def _source(
    config: Config,
    found: Survey,
    supply: TableSupply | StreamSupply | None,
    engine: Engine,
    backend: Backend,
    scoring: Scoring,
    comm: Comm,
) -> Source:
    if config.replay_rollouts is not None:
        return ReplaySource(
            Path(config.replay_rollouts),
            dict(zip(metric_names(config.rewards), settings.reward_weights(config), strict=True)),
        )
    assert found.codec is not None
    assert supply is not None
    return LiveSource(
        supply=supply,
        engine=engine,
        backend=backend,
        score=scoring,
        codec=found.codec,
        plan=CollectPlan(
            num_generations=config.num_generations,
            sampling=settings.sampling(config, found.codec, config.temperature),
            seed=config.seed,
        ),
        comm=comm,
        tasks={task: scoring.rewards.tasks.get(task, ()) for task in found.facts.tasks},
    )


def _evaluator(
    config: Config, found: Survey, engine: Engine, backend: Backend, scoring: Scoring, comm: Comm
) -> Evaluator | None:
    if config.eval_strategy == "no" or not found.eval_sets:
        return None
    assert found.codec is not None
    return Evaluator(
        sets=[EvalPrompts(name=name, prompts=table.entries) for name, table in found.eval_sets],
        engine=engine,
        view=backend.rollout_view,
        score=scoring,
        codec=found.codec,
        plan=CollectPlan(
            num_generations=config.num_generations_eval,
            sampling=settings.sampling(config, found.codec, config.eval_temperature),
            seed=config.seed,
        ),
        comm=comm,
        rewards=scoring.rewards.tasks,
    )


def _longest_prompt(found: Survey, source: Source) -> int:
    if isinstance(source, ReplaySource):
        return source.longest_prompt
    return found.facts.longest_prompt or 0


def _total_steps(plan: BatchPlan, source: Source) -> int:
    if not isinstance(source, ReplaySource):
        assert plan.total_steps is not None
        return plan.total_steps
    held = source.num_rollouts * plan.steps_per_rollout
    return held if plan.total_steps is None else min(held, plan.total_steps)


def _save_plan(config: Config, facts: Facts, policy: Policy, guards: Guards) -> SavePlan:
    origin = model_dir(config)
    measured = {"pass_rates": facts.pass_rates.digest} if facts.pass_rates is not None else {}
    return SavePlan(
        every=config.save_steps,
        total_limit=config.save_total_limit,
        keep_trainer_state=config.keep_trainer_state,
        model_only=config.save_only_model,
        keep_best=config.load_best_model_at_end,
        check=guards.check_before_save,
        write_model=lambda target: save_policy(policy, origin, target),
        meta={"model": config.model, **measured},
    )


def _files(resolved: Resolved, plan: BatchPlan, found: Survey) -> RunFiles:
    config = resolved.config
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if config.overwrite_output_dir and found.facts.resume is None:
        delete_run(output)
    limits = RolloutLimits(log=config.rollout_log, max_gb=config.rollout_log_max_gb)  # type: ignore[arg-type]
    files = RunFiles(output, rollouts=limits)
    files.tidy()
    if found.facts.resume is None and config.resume_from_checkpoint == "auto":
        # A run that was ended before its first checkpoint may have left records.
        files.supersede_all()
    files.write_config(to_yaml(settings.without_start_options(resolved)))
    files.write_plan(report_json(config, found.facts, plan))
    return files


def _report_layout(job: Job) -> None:
    if job.backend.policy.stream == "padded":
        seen = "the model does not keep packed rows apart (found by the probe at load)"
        job.recorder.event("finding", step=job.progress.step, code="F105", seen=seen)
    slow = slow_attention(job.backend.policy)
    if slow:
        job.recorder.say(*coded("W175", sentence(slow)))
        job.recorder.event("finding", step=job.progress.step, code="W175", seen=slow)


def _start_trackers(config: Config, job: Job) -> None:
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
        say=lambda text: recorder.say(f"tracker   {text}"),
        event=event,
    )
