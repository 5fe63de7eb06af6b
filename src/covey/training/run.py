"""Wiring: the one place that turns a configuration into the parts of a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from covey.algorithm.losses import LossConfig
from covey.algorithm.needs import needs
from covey.batching.credit import CreditConfig
from covey.batching.pack import PackPlan
from covey.checkpoint.read import read_states
from covey.checkpoint.registry import Registry
from covey.comm import Comm, GroupComm, LocalComm
from covey.config.resolve import Resolved
from covey.config.schema import Config
from covey.config.write import to_yaml
from covey.data.order import Order
from covey.data.text import TextCodec
from covey.errors import GuardStop
from covey.learner.backends.base import Backend
from covey.learner.backends.ddp import DDPBackend
from covey.learner.backends.single import SingleBackend
from covey.learner.optimizer import OptimizerConfig
from covey.learner.schedule import Schedule
from covey.models.load import choose_stream, load_policy, save_policy
from covey.models.policy import Policy
from covey.plan.batch import BatchPlan, batch_plan
from covey.plan.checks import refuse_faults
from covey.plan.facts import Facts
from covey.rewards.registry import build
from covey.rollout.collect import CollectPlan
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles, delete_run
from covey.telemetry.plot import plot_rewards
from covey.telemetry.rollouts import RolloutLimits
from covey.training.facts import Survey, model_dir, survey
from covey.training.job import Job, SavePlan, Signals
from covey.training.loop import run
from covey.training.source import LiveSource, ReplaySource, Source
from covey.training.state import OptimizerState, Progress, RandomState, RolloutBuffer
from covey.types import Problem, SamplingParams

# Below this many parameters the usual learning rates of large models train next to nothing.
_SMALL_MODEL, _SMALL_MODEL_RATE = 50_000_000, 1e-5
_SIGNAL_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and where its files are."""

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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    found = survey(resolved.config, world) if found is None else found
    problems = refuse_faults(resolved, found.facts)
    with ExitStack() as stack:
        comm = stack.enter_context(_ranks(world))
        job = build_job(resolved, found, comm)
        stack.callback(job.backend.close)
        if job.console is not None:
            stack.enter_context(job.console)
            _announce(job.console, job, found, problems)
        stack.enter_context(_handlers(job.signals))
        try:
            run(job)
        except GuardStop as stop:
            job.stop(stop.finding)
            raise
        if job.console is not None:
            job.console.say(_closing(job))
    if job.files is not None and job.progress.step:
        plot_rewards(job.files.metrics_path, job.output_dir / "reward.png", title=job.output_dir.name)
    return Outcome(
        exit_code=_SIGNAL_CODES.get(signal.Signals(job.signals.number), 1) if job.signals.number else 0,
        output_dir=job.output_dir,
        step=job.progress.step,
        total_steps=job.total_steps,
        checkpoint=job.output_dir / f"checkpoint-{job.progress.step}",
    )


def build_job(resolved: Resolved, found: Survey, comm: Comm) -> Job:
    """Every part of a run, wired and, where it resumes, restored."""
    config = resolved.config
    device = _device()
    resume = None if found.facts.resume is None else Path(found.facts.resume.path)
    plan = batch_plan(config, comm.world, found.facts.num_prompts)
    settled = needs(beta=config.beta, steps_per_rollout=plan.steps_per_rollout)
    backend = _backend(config, device, resume, comm, reference=settled.reference)
    policy = backend.policy
    choose_stream(policy)
    engine = _engine(config, policy)
    assert found.codec is not None
    source = _source(config, found, plan, engine, backend, comm)
    total_steps = _total_steps(plan, source)
    files = _files(resolved, plan, found.facts) if comm.rank == 0 else None
    progress, buffer, registry = Progress(), RolloutBuffer(), Registry()
    for component in (progress, buffer, OptimizerState(backend), RandomState(comm)):
        registry.register(component)
    registry.expect(("progress", "rollout", "optimizer", "rng"))
    if resume is not None:
        registry.load(read_states(resume))
        if files is not None:
            # A rollout that is in the buffer has its file already.
            started = progress.rollout if buffer.rows else progress.rollout - 1
            files.supersede_after(progress.step, started)
    engine.publish(backend.named_weights(), progress.step)
    return Job(
        source=source,
        engine=engine,
        backend=backend,
        credit=CreditConfig(
            scale_rewards=config.scale_rewards, mask_truncated_completions=config.mask_truncated_completions
        ),
        needs=settled,
        loss=_loss(config),
        schedule=_schedule(config, total_steps),
        pack_plan=_pack_plan(config, found, policy, comm, source),
        comm=comm,
        registry=registry,
        progress=progress,
        buffer=buffer,
        total_steps=total_steps,
        stop_after=config.stop_after_steps,
        save=_save_plan(config, policy),
        output_dir=Path(config.output_dir),
        files=files,
        console=Console(total_steps, config.logging_steps) if comm.rank == 0 else None,
        saved_step=progress.step if resume is not None else -1,
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What the forward pass computes in; the masters are float32 always."""
    if config.torch_dtype == "auto":
        low = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if low else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.torch_dtype]


def _backend(
    config: Config, device: torch.device, resume: Path | None, comm: Comm, *, reference: bool
) -> Backend:
    policy = load_policy(
        resume or model_dir(config),
        device=device,
        disable_dropout=config.disable_dropout,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    dtype = compute_dtype(config, device)
    settings = OptimizerConfig(
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    frozen = _reference(config, device, dtype) if reference else None
    kind = DDPBackend if comm.world > 1 else SingleBackend
    return kind(policy, settings, compute_dtype=dtype, reference=frozen)


def _reference(config: Config, device: torch.device, dtype: torch.dtype) -> Policy:
    """A frozen copy of the model that the run started from, a resumed run too."""
    policy = load_policy(model_dir(config), device=device, disable_dropout=True, gradient_checkpointing=False)
    policy.requires_grad_(False)
    policy.eval()
    choose_stream(policy)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


def _engine(config: Config, policy: Policy) -> Engine:
    # A model that cannot run as a stream keeps state that the native engine's cache does not know.
    if config.engine == "generate" or policy.stream == "padded":
        return GenerateEngine(policy)
    return NativeEngine(policy)


def _sampling(config: Config, codec: TextCodec) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_completion_length,
        stop_token_ids=codec.stop_token_ids,
    )


def _weights(config: Config) -> list[float]:
    return [float(w) for w in config.reward_weights or [1.0] * len(config.reward_funcs)]


def _source(
    config: Config, found: Survey, plan: BatchPlan, engine: Engine, backend: Backend, comm: Comm
) -> Source:
    if config.replay_rollouts is not None:
        named = dict(zip(config.reward_funcs, _weights(config), strict=True))
        return ReplaySource(Path(config.replay_rollouts), named)
    assert found.prompts is not None and found.codec is not None
    return LiveSource(
        prompts=found.prompts,
        order=Order(
            num_prompts=len(found.prompts.entries),
            per_rollout=plan.prompts_per_rollout,
            seed=config.data_seed,
            shuffle=config.dataset_shuffle,
        ),
        engine=engine,
        backend=backend,
        rewards=build(config.reward_funcs),
        weights=_weights(config),
        codec=found.codec,
        plan=CollectPlan(
            num_generations=config.num_generations, sampling=_sampling(config, found.codec), seed=config.seed
        ),
        comm=comm,
    )


def _total_steps(plan: BatchPlan, source: Source) -> int:
    if not isinstance(source, ReplaySource):
        assert plan.total_steps is not None
        return plan.total_steps
    held = source.num_rollouts * plan.steps_per_rollout
    return held if plan.total_steps is None else min(held, plan.total_steps)


def _loss(config: Config) -> LossConfig:
    return LossConfig(
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        beta=config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
    )


def _schedule(config: Config, total_steps: int) -> Schedule:
    warmup = config.warmup_steps or round(config.warmup_ratio * total_steps)
    return Schedule(
        kind=config.lr_scheduler_type,
        peak=config.learning_rate,
        warmup_steps=warmup,
        total_steps=total_steps,
    )


def _pack_plan(config: Config, found: Survey, policy: Policy, comm: Comm, source: Source) -> PackPlan:
    longest = found.facts.longest_prompt or 0
    if isinstance(source, ReplaySource):
        longest = source.longest_prompt
    return PackPlan(
        rank=comm.rank,
        world=comm.world,
        completions_per_rank=config.per_device_train_batch_size * config.gradient_accumulation_steps,
        num_iterations=config.num_iterations,
        max_tokens=config.per_device_train_batch_size * (longest + config.max_completion_length),
        max_completion_length=config.max_completion_length,
        stream=policy.stream,
        device=policy.device,
    )


def _save_plan(config: Config, policy: Policy) -> SavePlan:
    origin = model_dir(config)
    return SavePlan(
        every=config.save_steps,
        total_limit=config.save_total_limit,
        keep_trainer_state=config.keep_trainer_state,
        model_only=config.save_only_model,
        write_model=lambda target: save_policy(policy, origin, target),
        meta={"model": config.model},
    )


def _files(resolved: Resolved, plan: BatchPlan, facts: Facts) -> RunFiles:
    config = resolved.config
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if config.overwrite_output_dir and facts.resume is None:
        delete_run(output)
    limits = RolloutLimits(log=config.rollout_log, max_gb=config.rollout_log_max_gb)  # type: ignore[arg-type]
    files = RunFiles(output, rollouts=limits)
    files.write_config(to_yaml(_lasting(resolved)))
    files.write_plan({"batch": plan.as_dict(), "in_words": plan.in_words(), "facts": asdict(facts)})
    return files


def _lasting(resolved: Resolved) -> Resolved:
    """The configuration without what is meant for one start: used again, its file must not delete or
    resume."""
    once = ("overwrite_output_dir", "resume_from_checkpoint", "allow_changes", "stop_after_steps")
    defaults = {name: Config.model_fields[name].default for name in once}
    sources = {**resolved.sources, **dict.fromkeys(once, "default, whatever this start was given")}
    return replace(resolved, config=resolved.config.model_copy(update=defaults), sources=sources)


def _announce(console: Console, job: Job, found: Survey, problems: list[Problem]) -> None:
    """What a person wants to know before the first step."""
    policy = job.backend.policy
    count = sum(p.numel() for p in policy.parameters())
    dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
    native = isinstance(job.engine, NativeEngine)
    engine = "native, on the learner's own weights" if native else "transformers generate"
    console.say(f"run       {job.output_dir}")
    console.say(f"model     {count / 1e6:.2f} M parameters, {dtype}, {policy.device}")
    console.say(f"engine    {engine}; rows are laid out as: {policy.stream}")
    if policy.stream == "padded":
        code, seen = "F105", "the model carries state between packed rows (found by the probe at load)"
        console.say(f"{code}      {seen};")
        console.say("          it trains on padded rows and samples with generate, both slower")
        if job.files is not None:
            job.files.append_event("finding", step=job.progress.step, code=code, seen=seen)
    for problem in problems:
        console.say(f"{problem.code:<9} {problem.option}: {problem.seen} {problem.why}")
    if count < _SMALL_MODEL and job.schedule.peak < _SMALL_MODEL_RATE:
        console.say(
            f"note      learning_rate {job.schedule.peak:g} is little for a model of this size; try 1e-4"
        )
    if found.prompts is not None:
        first = found.prompts.entries[0]
        console.say(f"prompt 0  {first.text!r}")
        if first.messages is None and found.codec is not None and found.codec.chat_template is not None:
            console.say(
                "note      prompts are text and go to the model as they are, without its chat template;"
            )
            console.say("          a column `messages` (or `question`) goes through the template")
    if job.progress.step:
        console.say(f"resumed   at step {job.progress.step} of {job.total_steps}")


def _closing(job: Job) -> str:
    """Where the run ended, and how to go on."""
    name = job.output_dir / f"checkpoint-{job.progress.step}"
    if job.progress.step >= job.total_steps:
        return f"done      {job.progress.step} steps; the model is {name}"
    going_on = f"--output_dir {job.output_dir} --resume_from_checkpoint latest"
    where = f"at step {job.progress.step} of {job.total_steps}"
    return f"stopped   {where}; go on with the same options and {going_on}"


@contextmanager
def _ranks(world: int) -> Iterator[Comm]:
    """The process group of the run; metadata travels over gloo, gradients over NCCL where there are GPUs."""
    if world == 1:
        yield LocalComm()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield GroupComm()
    finally:
        dist.destroy_process_group()


@contextmanager
def _handlers(signals: Signals) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the loop to save and end; a second Ctrl-C ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if signals.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.number = number
        sys.stderr.write("covey: ending after this step, then saving; Ctrl-C again ends at once\n")

    before = {number: signal.signal(number, ask) for number in _SIGNAL_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
