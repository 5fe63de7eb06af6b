"""From a configuration to the parts of a run. This file, backend.py and build_source.py alone know every
implementation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from covey.batching.needs import needs as needs_of
from covey.batching.shares import pack_plan
from covey.checkpoint.manifest import read_manifest
from covey.checkpoint.read import read_shards, read_states
from covey.checkpoint.registry import Registry, Stateful
from covey.checks.batch import batch_plan
from covey.checks.pass_rates.judge import is_reordered
from covey.checks.survey import Survey, model_dir
from covey.comm import Comm
from covey.config.resolve import Resolved
from covey.config.write import to_yaml, without_start_options
from covey.environments.agents import Notes
from covey.health.guards.invariants import EngineName
from covey.health.rewards import RewardWatch
from covey.health.rules import Rules
from covey.health.saved import checkpoints_of
from covey.health.weights import WeightWatch
from covey.learner.backends.base import Backend
from covey.models.dropout import dropouts
from covey.models.quantized import coarsest_dtype
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.plan.facts import Facts
from covey.plan.memory import memory_plan
from covey.plan.report import report_json
from covey.rewards.registry import build
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles, delete_run, put_aside
from covey.telemetry.owner import Lock
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog
from covey.text_files import TextFiles, own_template
from covey.training.ahead import AheadSource
from covey.training.backend import backend_for, sampling_engine
from covey.training.buffer import RolloutBuffer, RolloutTokens
from covey.training.build_source import (
    at_scheduled_temperature,
    collector_for,
    evaluator_for,
    longest_prompt_of,
    prompt_supply,
    publisher_for,
    selecting_groups,
    source_for,
    total_steps_of,
)
from covey.training.evaluate import Best
from covey.training.evaluations import Evaluations
from covey.training.failure import writing
from covey.training.guards import Guards
from covey.training.health import Health
from covey.training.hooks import Hooks, NoHooks
from covey.training.job import Job
from covey.training.limits import Limits
from covey.training.loss import is_comparable, may_be_silent, plain_loss
from covey.training.memory import StepCost
from covey.training.objective import objective_of
from covey.training.process import compute_dtype, own_device
from covey.training.recorder import Recorder
from covey.training.saving import Saver
from covey.training.scoring import Scoring, step_tokens
from covey.training.select import SelectingSource
from covey.training.source import Source, upcoming
from covey.training.state import (
    OptimizerState,
    Progress,
    RandomState,
    ReferenceState,
    check_position,
)


def build_job(
    resolved: Resolved, found: Survey, comm: Comm, lock: Lock | None = None, hooks: Hooks | None = None
) -> Job:
    """Build every part of a run, connect them and, for a resume, restore them."""
    config, facts = resolved.config, _facts_of_all(found.facts, comm)
    assert found.codec is not None
    resume = None if facts.output.resume is None else Path(facts.output.resume.path)
    plan = batch_plan(config, comm.world, facts.prompts.num_used)
    needs = needs_of(config, plan.steps_per_rollout)
    device = own_device()
    backend = backend_for(config, facts, device, comm, reference=needs.reference, live=found.live)
    engine = sampling_engine(config, facts, backend, comm, found.codec.tokenizer, found.live)
    publisher = publisher_for(config, found, backend, engine, comm)
    supply = prompt_supply(config, found, plan)
    progress = Progress(upcoming(supply), may_differ=is_reordered(config, facts.data, facts.output))
    best = Best(config.metric_for_best_model, greater_is_better=config.greater_is_better)
    scoring = _scoring(config, found, plan, progress)
    collector = collector_for(config, found, publisher, scoring, comm, backend.sampler)
    source = source_for(config, found, supply, collector, scoring, plan)
    total_steps = scoring.total_steps = total_steps_of(plan, source)
    objective = objective_of(config, needs, total_steps)
    source = selecting_groups(at_scheduled_temperature(source, objective, plan), config, found)
    buffer = _buffer(config, found, source, backend, comm)
    agents = None if config.multi_turn_scheduler is None else found.agents
    notes = None if agents is None else agents.notes
    health = _health(config, plan, backend, engine, comm, scoring.rewards.tasks, notes)
    states = (progress, RandomState(comm), best, objective.bonus)
    registry = _registry(states, buffer, backend, health, source, comm)
    with writing(Path(config.output_dir), lock, 0):
        files = _files(resolved, plan, found) if comm.rank == 0 else None
    if resume is not None:
        _restore(registry, resume, progress, buffer, files)
    recorder = _recorder(config, files, total_steps, lock, comm)
    limits = Limits(options=config, total_steps=total_steps, comm=comm)
    return Job(
        source=source,
        publisher=publisher,
        backend=backend,
        scoring=scoring,
        codec=found.codec,
        objective=objective,
        comm=comm,
        progress=progress,
        buffer=buffer,
        evaluations=Evaluations(
            options=config,
            evaluator=evaluator_for(config, found, collector, scoring),
            best=best,
            steps_per_epoch=plan.steps_per_epoch,
            limits=limits,
            recorder=recorder,
        ),
        health=health,
        limits=limits,
        saver=_saver(config, found, backend, registry, progress, best, recorder, health.guards),
        recorder=recorder,
        cost=StepCost(device, memory_plan(config, facts)),
        hooks=hooks or NoHooks(),
    )


def _facts_of_all(facts: Facts, comm: Comm) -> Facts:
    """Return the facts with the least free memory of all ranks, so that what follows from it is the same on
    all."""
    least = -comm.max([-float(facts.machine.free_memory_bytes or 0)])[0]
    return replace(facts, machine=replace(facts.machine, free_memory_bytes=int(least) or None))


def _buffer(config: Config, found: Survey, source: Source, backend: Backend, comm: Comm) -> RolloutBuffer:
    longest = longest_prompt_of(found, source)
    return RolloutBuffer(pack_plan(config, longest, backend.policy, comm), comm, found.images)


def _scoring(config: Config, found: Survey, plan: BatchPlan, progress: Progress) -> Scoring:
    assert found.codec is not None
    ends = step_tokens(found.codec, config.step_separator)
    # What is replayed has its scores.
    weights = config.weights if found.rewards else ()
    return Scoring(found.rewards or build([]), weights, progress, plan.steps_per_epoch, ends)


def _health(
    config: Config,
    plan: BatchPlan,
    backend: Backend,
    engine: Engine,
    comm: Comm,
    tasks: Mapping[str, Collection[str]],
    notes: Notes | None,
) -> Health:
    guards = _guards(config, plan, backend, engine, comm)
    watch = RewardWatch(tasks)
    # Advice is held against what the run computes with, whatever was typed.
    dtype = str(compute_dtype(config, backend.policy.device)).removeprefix("torch.")
    options = config.model_dump() | {"torch_dtype": dtype}
    rules = Rules(options, saved=partial(checkpoints_of, Path(config.output_dir)))
    return Health(rules=rules, watch=watch, guards=guards, notes=notes)


def _registry(
    components: Iterable[Stateful | None],
    buffer: RolloutBuffer,
    backend: Backend,
    health: Health,
    source: Source,
    comm: Comm,
) -> Registry:
    """Return the registry of what a checkpoint keeps; None stands for a component that the run does not
    have."""
    registry = Registry()
    for component in (buffer, *components):
        if component is not None:
            registry.register(component)
    registry.register_sharded(OptimizerState(backend))
    registry.register_sharded(RolloutTokens(buffer), has_some=lambda: bool(buffer.rows))
    if backend.moving is not None and backend.moving.moves:
        registry.register_sharded(ReferenceState(backend.moving, comm))
    registry.register(health, is_later=True)
    for part in (source, source.live) if isinstance(source, SelectingSource) else (source,):
        if isinstance(part, SelectingSource | AheadSource):
            registry.register(part, is_later=True)
    registry.expect(("progress", "rollout", "optimizer", "rng", "best", "health"))
    return registry


def _guards(config: Config, plan: BatchPlan, backend: Backend, engine: Engine, comm: Comm) -> Guards:
    moving, policy = backend.moving, backend.policy
    dtype = compute_dtype(config, policy.device)
    return Guards(
        options=config,
        max_age=config.max_staleness * plan.steps_per_rollout,
        untrained=_frozen_unasked(config, backend) if policy.adapter is None else (),
        of_images=frozenset(n for n in backend.trained() if policy.part_of(n) != "llm"),
        only_images="llm" not in policy.trained_parts,
        comm=comm,
        num_episodes=plan.prompts_per_rollout * config.num_generations,
        plain_loss=plain_loss(config),
        is_comparable=is_comparable(config),
        may_be_silent=may_be_silent(config),
        has_dropout=not config.disable_dropout and bool(dropouts(policy)),
        engine=_engine_name(config, engine),
        is_low_precision=coarsest_dtype(policy, dtype) != torch.float32,
        weights=WeightWatch(backend, dict if moving is None else moving.tensors),
    )


def _frozen_unasked(config: Config, backend: Backend) -> tuple[str, ...]:
    """Return the tensors of a model without an adapter that are frozen, though no option says so."""
    policy, parts = backend.policy, config.frozen_parts
    return tuple(
        name
        for name in backend.frozen()
        if not name.startswith("reference ") and not (policy.vision and policy.part_of(name) in parts)
    )


def _engine_name(config: Config, engine: Engine) -> EngineName:
    """Return the name of what samples, which is not always the engine that was asked for."""
    if config.rollout_func is not None:
        return "rollout_func"
    if config.rollout_servers:
        return "servers"
    if config.use_vllm:
        return "vllm"
    return "generate" if isinstance(engine, GenerateEngine) else "native"


def _restore(
    registry: Registry, resume: Path, progress: Progress, buffer: RolloutBuffer, files: RunFiles | None
) -> None:
    """Give every component its state back, and put aside what was recorded after it."""
    # Its files were compared with its manifest before the run was built.
    states = read_states(resume, verified=read_manifest(resume))
    # A run that no longer selects or samples ahead goes on without what that would need.
    may_lack = (SelectingSource.name, AheadSource.name)
    kept = {n: s for n, s in states.items() if n in registry.names or n not in may_lack}
    registry.load(kept, read_shards(resume))
    check_position(progress, buffer)
    if files is not None:
        # A rollout that is in the buffer has its file already.
        started = progress.rollout if buffer.rows else progress.rollout - 1
        files.supersede_after(progress.step, started)


def _recorder(
    config: Config, files: RunFiles | None, total_steps: int, lock: Lock | None, comm: Comm
) -> Recorder:
    """Return the sinks, of which ranks other than the first have that of their rollouts alone."""
    output = Path(config.output_dir)
    limits = RolloutLimits(log=config.rollout_log, max_gb=config.rollout_log_max_gb)  # type: ignore[arg-type]
    return Recorder(
        options=config,
        rollouts=RolloutLog(output / "rollouts", limits, rank=comm.rank, world=comm.world),
        comm=comm,
        files=files,
        lock=lock,
        console=Console(total_steps, config.logging_steps) if files is not None else None,
        total_steps=total_steps,
    )


def _saver(
    config: Config,
    found: Survey,
    backend: Backend,
    registry: Registry,
    progress: Progress,
    best: Best,
    recorder: Recorder,
    guards: Guards,
) -> Saver:
    base, pass_rates = None if found.live is None else found.live.name, found.facts.data.pass_rates
    measured = {"pass_rates": pass_rates.digest} if pass_rates is not None else {}
    adapter = found.facts.lora.start
    reference = {"reference": adapter.digest} if adapter is not None and adapter.digest is not None else {}
    return Saver(
        options=config,
        check=guards.check_before_save,
        model_writer=partial(backend.model_writer, _text_files(config, found), base),
        meta={"model": config.model, **measured, **reference, "rewards": dict(found.facts.rewards.texts)},
        registry=registry,
        best=best,
        recorder=recorder,
        comm=recorder.comm,
        saved_step=-1 if found.facts.output.resume is None else progress.step,
    )


def _text_files(config: Config, found: Survey) -> TextFiles:
    """Return the files by which other programs prompt and stop the model as the run did."""
    live, codec = found.live, found.codec
    assert codec is not None
    origin = model_dir(config) if live is None else live.directory
    is_own = config.chat_template is None and codec.template_text == own_template(origin)
    return TextFiles(
        origin=origin,
        template=None if is_own else codec.template_text,
        stop_token_ids=codec.stop_token_ids,
    )


def _files(resolved: Resolved, plan: BatchPlan, found: Survey) -> RunFiles:
    config = resolved.config
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if found.facts.output.resume is None:
        clear = {"true": delete_run, "aside": put_aside}
        clear.get(config.overwrite_output_dir, Path)(output)
    files = RunFiles(output)
    files.tidy()
    if found.facts.output.resume is None and config.resume_from_checkpoint == "auto":
        # A run that was ended before its first checkpoint may have left records.
        files.supersede_all()
    files.write_config(to_yaml(without_start_options(resolved)))
    files.write_plan(report_json(config, found.facts, plan))
    return files
