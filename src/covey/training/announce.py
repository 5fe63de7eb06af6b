"""What a run says before its first step and after its last one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from covey.config.adapters import ADAPTER_CONFIG
from covey.data.text import TextCodec
from covey.errors import CONTINUE
from covey.learner.backends.base import Backend
from covey.models import sdpa
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.recompute import IN_WORDS
from covey.plan.report import report_lines
from covey.plan.words import coded, flags, note_lines
from covey.rollout.engine import Engine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.client import ServerEngine
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.group import GroupEngine
from covey.text_files import stops_of
from covey.texts import Whole, counted, joined, tr
from covey.training.ahead import waits
from covey.training.job import Job
from covey.types import Problem


def opening(
    config: Config, facts: Facts, batch: BatchPlan, job: Job, problems: Sequence[Problem]
) -> list[str]:
    """What a person wants to know before the first step: the plan, and what only the loaded model tells."""
    policy = job.backend.policy
    lines = [
        tr("run       {output_dir}", output_dir=job.saver.output_dir),
        *report_lines(config, facts, batch, brief=True),
        tr(
            "engine    {engine}; rows are laid out as: {rows}",
            engine=_engine(job.publisher.engine, job.backend, facts),
            rows=_rows(policy),
        ),
        tr("kernels   {kernels}", kernels=_kernels(config, policy)),
        tr("ratios    {ratios}", ratios=_ratios(config, job)),
    ]
    if policy.stream == "padded":
        lines.append(tr("F105      {why};", why=why_padded(policy)))
        lines.append(tr("          it trains on padded rows and samples with generate, both slower"))
    for problem in problems:
        lines += note_lines(problem)
    if job.progress.step:
        lines.append(
            tr(
                "resumed   at step {step} of {total_steps}",
                step=job.progress.step,
                total_steps=job.limits.total_steps,
            )
        )
        if job.progress.step >= job.limits.total_steps:
            lines.append(
                tr(
                    "          no step is left to take: this run is planned to end at step {total_steps}; a "
                    "larger --max_steps continues it",
                    total_steps=job.limits.total_steps,
                )
            )
        if not job.health.rules.history.num_records:
            lines.append(
                tr(
                    "          the checkpoint has no records for the doctor's rules: they start from "
                    "this step"
                )
            )
    return lines


def _engine(engine: Engine, backend: Backend, facts: Facts) -> str:
    if isinstance(engine, ServerEngine):
        versions = {
            s.address: f" (vLLM {s.vllm.version})" for s in facts.servers.asked or () if s.vllm is not None
        }
        names = ", ".join(f"{address}{versions.get(address, '')}" for address in engine.addresses)
        return tr("{servers}: {names}", servers=counted(len(engine.addresses), "rollout server"), names=names)
    if isinstance(engine, VllmEngine | GroupEngine):
        if not (facts.machine.cuda and facts.layout.engine_sleeps):
            return engine.in_words()
        return tr(
            "{engine}; asleep while the model trains, so torch's memory does not grow in segments "
            "(expandable_segments:False)",
            engine=engine.in_words(),
        )
    policy = backend.sampler
    dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
    whose = (
        tr("a copy that is gathered for each rollout")
        if backend.sampler is not backend.policy
        else tr("the learner's own weights")
    )
    name = tr("native, on {whose}", whose=whose) if isinstance(engine, NativeEngine) else "generate"
    compiled = tr(", compiled in C") if isinstance(engine, NativeEngine) and engine.is_compiled else ""
    return tr(
        "{name} in {dtype} on {device}{compiled}",
        name=name,
        dtype=dtype,
        device=policy.device,
        compiled=compiled,
    )


def _ratios(config: Config, job: Job) -> str:
    """Which old logprobs the ratios of the loss are against."""
    own = (
        tr("against the learner's logprobs, computed before the first step of each rollout")
        if job.objective.needs.old
        else tr("against the policy itself, exactly 1: each rollout is one step")
    )
    if config.is_ahead and not config.use_decoupled_loss:
        return tr(
            "against the logprobs of the sampler, whose weights may be {rollouts} older",
            rollouts=counted(config.max_staleness, "rollout"),
        )
    if not config.replay_buffer_size:
        return own
    return tr("{own}; in replayed groups against those of their sampler", own=own)


def _rows(policy: Policy) -> str:
    """The layout, and what a shared prompt lacks where the probe forbids it."""
    alone = policy.stream == "prefix" and not policy.shares_prompts
    return (
        tr("{stream}, without sharing prompts between rows", stream=policy.stream) if alone else policy.stream
    )


def _kernels(config: Config, policy: Policy) -> str:
    """What computes the forward pass of training, and why where that is not what the option says."""
    attention: str = policy.attention
    if policy.stream == "padded":
        attention = tr("the model's own, on padded rows")
    elif attention == "sdpa" and policy.kernels.is_compiled:
        attention = tr("sdpa, computed in C for plain causal attention")
    elif config.attn_impl == "auto" and attention == "sdpa" and policy.no_flex:
        attention = tr("sdpa (flex does not compile here: {no_flex})", no_flex=policy.no_flex)
    away = tr(", kept in the machine's memory until then") if policy.offload else ""
    norms = tr("; norms and gated layers: liger-kernel") if policy.has_liger else ""
    plain = tr("; all else by torch's operators") if policy.kernels.name == "torch" else ""
    rows = "".join(f"; {name}: {kernel}" for name, kernel in sdpa.kernels(policy).items())
    return tr(
        "attention: {attention}{norms}{rows}{plain}; {in_words}{away}",
        attention=attention,
        norms=norms,
        rows=rows,
        plain=plain,
        in_words=IN_WORDS[policy.recompute],
        away=away,
    )


def why_padded(policy: Policy) -> str:
    """Return why a model is trained on padded rows."""
    if policy.vision is not None and not policy.vision.is_causal:
        return tr("in this model the tokens of an image see each other, which needs rows of their own")
    return tr("the model does not keep packed rows apart (found by the probe at load)")


def slow_attention(policy: Policy) -> str:
    """What torch attends to by its math kernel on this GPU; empty where a fused one takes everything."""
    slow = [name for name, kernel in sdpa.kernels(policy).items() if kernel == "math"]
    if not slow:
        return ""
    heads = policy.model.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
    scores = size(heads * 4096**2 * 4)
    return tr(
        "on this GPU torch computes attention for {slow} with its math kernel, which keeps every "
        "score in float32: a row of 4,096 tokens takes {scores} in each layer",
        slow=joined(tr(" and "), slow),
        scores=scores,
    )


def _signs(job: Job) -> list[str]:
    """For how many steps each rule held, where one did."""
    counts = job.health.rules.counts
    if not counts:
        return []
    words = joined(
        ", ", [tr("{code} in {steps}", code=code, steps=counted(n, "step")) for code, n in counts.items()]
    )
    directory = shlex.quote(str(job.saver.output_dir))
    return [
        tr("signs     {words}", words=words),
        tr("          `covey doctor {directory}` explains them", directory=directory),
    ]


def not_in_files(config: Config, codec: TextCodec, origin: Path) -> list[str]:
    """What makes the run's prompts and ends its completions, and no file of a checkpoint brings along: what
    the template is given, and the end tokens of an adapter, which is loaded onto the base of `origin`."""
    given = {name: getattr(config, name) for name in _TOLD}
    told = {name: value for name, value in given.items() if value not in (None, "", {})}
    lines = []
    if told:
        typed = flags({name: _cut(value) for name, value in told.items()})
        lines += coded(
            tr("prompts"),
            tr(
                "the run made its prompts with {typed}; the files of a model cannot store this, so give "
                "the same options wherever the model is used",
                typed=typed,
            ),
        )
    base = stops_of(origin)
    if config.tuner_type == "lora" and not {*codec.stop_token_ids} <= {*base}:
        lines += coded(
            tr("ends"),
            tr(
                "the adapter's generation_config.json lists the end tokens {stops}, but transformers and "
                "peft read the file of the base model, which lists {base}; pass the adapter's file to "
                "generate (GenerationConfig.from_pretrained), or merge the adapter",
                stops=_ids(codec.stop_token_ids),
                base=_ids(base) or tr("none"),
            ),
        )
    return lines


# What a template is given beside the messages of a row.
_TOLD = ("system", "enable_thinking", "chat_template_kwargs")
_LONGEST = 80


def _cut(value: object) -> object:
    is_long = isinstance(value, str) and len(value) > _LONGEST
    return f"{str(value)[:_LONGEST]}…" if is_long else value


def _ids(stop_token_ids: Sequence[int]) -> str:
    return ", ".join(map(str, stop_token_ids))


def closing(job: Job, verb: str, *, is_command: bool) -> list[str]:
    """Where the run ended, and how to go on: by a command of this verb, or by a call of a Python program."""
    step, total = job.progress.step, job.limits.total_steps
    name = job.saver.path(step)
    options = job.health.guards.options
    lines = _signs(job)
    lines += waits(job.health.rules.history, options.max_staleness, len(options.rollout_servers))
    result = job.saver.best_path if job.saver.options.load_best_model_at_end else None
    best = job.evaluations.best
    if job.evaluations.evaluator is not None and best.step is not None:
        kept = job.saver.best_path
        where = tr(": {kept}", kept=kept) if kept is not None else tr(", whose checkpoint was not kept")
        lines.append(
            tr(
                "best      {metric} {value:.4g} at step {step}{where}",
                metric=best.metric,
                value=best.value,
                step=best.step,
                where=where,
            )
        )
    if step >= total:
        result, steps = result or name, counted(step, "step")
        if not isfile(result / ADAPTER_CONFIG):
            return [*lines, tr("done      {steps}; the model is {result}", steps=steps, result=result)]
        merge = Whole(f"covey export {shlex.quote(str(result))} --merge")
        return [
            *lines,
            tr("done      {steps}; the adapter is {result}", steps=steps, result=result),
            tr("          `{merge}` writes the whole model", merge=merge),
        ]
    why = tr(" ({ended_by})", ended_by=job.limits.ended_by) if job.limits.ended_by else ""
    where = tr("stopped   at step {step} of {total}{why}; saved.", step=step, total=total, why=why)
    if job.saver.options.save_only_model:
        return [*lines, where]
    if not is_command:
        return [*lines, where, joined("          ", ["", CONTINUE])]
    config = shlex.quote(str(job.saver.output_dir / "config.yaml"))
    return [
        *lines,
        tr("{where} Continue with", where=where),
        f"          covey {verb} {config} --resume_from_checkpoint latest",
    ]
