"""What a run says before its first step and after its last one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from covey.learner.backends.base import Backend
from covey.models import sdpa
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.recompute import IN_WORDS
from covey.plan.report import report_lines
from covey.plan.shape import counted
from covey.plan.words import note_lines
from covey.rollout.engine import Engine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.client import ServerEngine
from covey.rollout.vllm.engine import VllmEngine
from covey.training.job import Job
from covey.types import Problem


def opening(
    config: Config, facts: Facts, batch: BatchPlan, job: Job, problems: Sequence[Problem]
) -> list[str]:
    """What a person wants to know before the first step: the plan, and what only the loaded model tells."""
    policy = job.backend.policy
    lines = [
        f"run       {job.saver.output_dir}",
        *report_lines(config, facts, batch, brief=True),
        f"engine    {_engine(job.engine, job.backend, facts)}; rows are laid out as: {_rows(policy)}",
        f"kernels   {_kernels(config, policy)}",
    ]
    if policy.stream == "padded":
        lines.append("F105      the model does not keep packed rows apart (found by the probe at load);")
        lines.append("          it trains on padded rows and samples with generate, both slower")
    for problem in problems:
        lines += note_lines(problem)
    if job.progress.step:
        lines.append(f"resumed   at step {job.progress.step} of {job.limits.total_steps}")
        if not job.rules.history.num_records:
            lines.append(
                "          its checkpoint knows no signs of the run: the rules compare with what comes"
            )
    return lines


def _engine(engine: Engine, backend: Backend, facts: Facts) -> str:
    if isinstance(engine, ServerEngine):
        versions = {s.address: f" (vLLM {s.vllm.version})" for s in facts.servers or () if s.vllm is not None}
        names = ", ".join(f"{address}{versions.get(address, '')}" for address in engine.addresses)
        return f"{counted(len(engine.addresses), 'rollout server')}: {names}"
    if isinstance(engine, VllmEngine):
        return engine.in_words()
    policy = backend.sampler
    dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
    whose = (
        "a copy that is gathered for each rollout"
        if backend.sampler is not backend.policy
        else "the learner's own weights"
    )
    name = f"native, on {whose}" if isinstance(engine, NativeEngine) else "generate"
    compiled = ", compiled in C" if isinstance(engine, NativeEngine) and engine.is_compiled else ""
    return f"{name} in {dtype} on {policy.device}{compiled}"


def _rows(policy: Policy) -> str:
    """The layout, and what a shared prompt lacks where the probe forbids it."""
    alone = policy.stream == "prefix" and not policy.shares_prompts
    return f"{policy.stream}, each pass with its own prompts" if alone else policy.stream


def _kernels(config: Config, policy: Policy) -> str:
    """What computes the forward pass of training, and why where that is not what the option says."""
    attention: str = policy.attention
    if policy.stream == "padded":
        attention = "the model's own, on padded rows"
    elif attention == "sdpa" and policy.kernels.is_compiled:
        attention = "sdpa, in C where it is plain"
    elif config.attn_impl == "auto" and attention == "sdpa" and policy.no_flex:
        attention = f"sdpa (flex does not compile here: {policy.no_flex})"
    away = ", and wait in the machine's memory" if policy.offload else ""
    norms = "; norms and gated layers: liger-kernel" if policy.has_liger else ""
    plain = "; all else by torch's operators" if policy.kernels.name == "torch" else ""
    rows = "".join(f"; {name}: {kernel}" for name, kernel in sdpa.kernels(policy).items())
    return f"attention: {attention}{norms}{rows}{plain}; {IN_WORDS[policy.recompute]}{away}"


def slow_attention(policy: Policy) -> str:
    """What torch attends to by its math kernel on this GPU; empty where a fused one takes everything."""
    slow = [name for name, kernel in sdpa.kernels(policy).items() if kernel == "math"]
    if not slow:
        return ""
    heads = policy.model.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
    scores = size(heads * 4096**2 * 4)
    return (
        f"on this GPU torch attends to {' and '.join(slow)} by its math kernel, which holds every score in "
        f"float32: a row of 4,096 tokens takes {scores} in each layer"
    )


def _signs(job: Job) -> list[str]:
    """For how many steps each rule held, where one did."""
    counts = job.rules.counts
    if not counts:
        return []
    words = ", ".join(f"{code} at {'1 step' if n == 1 else f'{n:,} steps'}" for code, n in counts.items())
    directory = shlex.quote(str(job.saver.output_dir))
    return [f"signs     {words}", f"          `covey doctor {directory}` says more"]


def closing(job: Job, verb: str) -> list[str]:
    """Where the run ended, and how to go on."""
    step, total = job.progress.step, job.limits.total_steps
    name = job.saver.path(step)
    lines = _signs(job)
    result = job.saver.best_path if job.saver.plan.keep_best else None
    if job.evaluator is not None and job.best.step is not None:
        kept = job.saver.best_path
        where = f": {kept}" if kept is not None else ", whose checkpoint was not kept"
        lines.append(f"best      {job.best.metric} {job.best.value:.4g} at step {job.best.step}{where}")
    if step >= total:
        return [*lines, f"done      {step} steps; the model is {result or name}"]
    why = f" ({job.ended_by})" if job.ended_by else ""
    config = shlex.quote(str(job.saver.output_dir / "config.yaml"))
    again = f"covey {verb} {config} --resume_from_checkpoint latest"
    return [*lines, f"stopped   at step {step} of {total}{why}; saved. Go on with", f"          {again}"]
