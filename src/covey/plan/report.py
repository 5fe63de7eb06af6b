"""What a run is going to do, in lines for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.config.filters import filters_of, in_words
from covey.config.quantization import quantization_of
from covey.config.start import BASE, START
from covey.options.schema import FACTS, Config
from covey.plan.activations import key_bytes
from covey.plan.batch import BatchPlan
from covey.plan.check_filters import engine_problems
from covey.plan.disk import disk_plan, size
from covey.plan.facts import Facts
from covey.plan.layout import HOST_MARGIN, Layout, deepspeed_word, state_bytes
from covey.plan.levers import OFFLOADS
from covey.plan.memory import MemoryPlan, memory_plan, recompute_of, training_of
from covey.plan.memory_training import has_kl
from covey.plan.memory_vllm import weight_bytes
from covey.plan.publish import publish_plan
from covey.plan.report_data import (
    ahead_lines,
    data_lines,
    evaluation_lines,
    millions,
    pass_rate_lines,
    reward_lines,
    selection_lines,
    task_lines,
    turn_lines,
)
from covey.plan.report_facts import facts_json
from covey.plan.report_parts import part_lines
from covey.plan.vllm_limits import UNTRIED
from covey.plan.words import flags
from covey.plan.works import Works
from covey.texts import Text, counted, joined, padded, tr
from covey.types import Problem

_SPLITS = 6


def report_lines(
    config: Config,
    facts: Facts,
    batch: BatchPlan,
    *,
    brief: bool = False,
    works: Works | None = None,
) -> list[str]:
    """Return the plan as texts of a line, each behind a word of at most ten letters; `brief` leaves out the
    parts of the memory."""
    forecast = memory_plan(config, facts)
    memory = forecast.in_words()
    publish = publish_plan(config, facts)
    # Of a GPU's share the layout says it.
    engine = [] if publish is None or publish.way == "gpu" else [publish.memory_in_words()]
    sections: dict[str, Sequence[str]] = {
        tr("model"): _model(config, facts),
        tr("ends at"): _ends(config, facts),
        tr("sampling"): _sampling(config, facts),
        tr("data"): data_lines(config, facts),
        tr("tasks"): task_lines(config, facts),
        tr("rates"): pass_rate_lines(config, facts),
        tr("rewards"): reward_lines(config, facts),
        tr("turns"): turn_lines(config, facts),
        tr("batch"): batch.in_words(),
        tr("select"): selection_lines(config, batch),
        tr("same run"): _splits(batch),
        tr("eval"): evaluation_lines(config, facts),
        tr("ahead"): ahead_lines(config, batch),
        tr("publish"): [] if publish is None else publish.in_words(),
        tr("layout"): [*_layout(config, facts, forecast), *_step(config, facts.layout)],
        tr("memory"): [*(memory[-1:] if brief else memory), *engine],
        tr("works"): [] if works is None else works.in_words(),
        tr("disk"): disk_plan(config, facts).in_words(),
        tr("prompt 0"): [Text(repr(facts.prompts.first))] if facts.prompts.first is not None else [],
    }
    return [
        joined("", [padded(name if number == 0 else "", 10), line])
        for name, lines in sections.items()
        for number, line in enumerate(lines)
    ]


def report_json(
    config: Config,
    facts: Facts,
    batch: BatchPlan,
    notes: Sequence[Problem] = (),
    works: Works | None = None,
) -> dict[str, Any]:
    """Return the plan as `covey plan --json` prints it and plan.json holds it."""
    parts = {"works": works, "publish": publish_plan(config, facts)}
    return {name: part.as_dict() for name, part in parts.items() if part is not None} | {
        "options": config.model_dump(),
        "batch": batch.as_dict(),
        "in_words": batch.in_words(),
        "memory": memory_plan(config, facts).as_dict(),
        "disk": disk_plan(config, facts).as_dict(),
        "lines": report_lines(config, facts, batch, works=works),
        "notes": [{"code": p.code, "option": p.option, "seen": p.seen, "why": p.why} for p in notes],
        "facts": facts_json(facts),
    }


def _model(config: Config, facts: Facts) -> list[str]:
    weight = (
        ""
        if facts.model.num_parameters is None
        else tr(": {millions} parameters", millions=millions(facts.model.num_parameters))
    )
    context = (
        ""
        if facts.model.context is None
        else tr(", context {model_context} tokens", model_context=facts.model.context)
    )
    revision = (
        tr(" at {model_revision}", model_revision=config.model_revision) if config.model_revision else ""
    )
    lines = [
        tr(
            "{model}{revision}{weight}{context}",
            model=config.model,
            revision=revision,
            weight=weight,
            context=context,
        )
    ]
    if config.tuner_type == "lora":
        kinds = [name for name, on in (("DoRA", config.use_dora), ("rsLoRA", config.use_rslora)) if on]
        kind = f" ({', '.join(kinds)})" if kinds else ""
        trained = (
            ""
            if facts.model.num_trained is None
            else tr("; {millions} parameters trained", millions=millions(facts.model.num_trained))
        )
        share = (
            f" ({facts.model.num_trained / facts.model.num_parameters:.2%})"
            if facts.model.num_trained is not None and facts.model.num_parameters
            else ""
        )
        targets = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in config.target_modules))
        lines.append(
            tr(
                "LoRA{kind} on {targets}, rank {lora_rank}, alpha {lora_alpha:g}{trained}{share}",
                kind=kind,
                targets=targets,
                lora_rank=config.lora_rank,
                lora_alpha=config.lora_alpha,
                trained=trained,
                share=share,
            )
        )
        lines += _base(config)
    elif not facts.model.parts or all(part.is_trained for part in facts.model.parts):
        lines.append(tr("all weights are trained"))
    return [*lines, *part_lines(config, facts)]


def _base(config: Config) -> list[str]:
    """What the adapter is trained on, and which one it begins with."""
    lines = []
    quantization = quantization_of(config)
    if quantization is not None:
        lines.append(
            tr(
                "QLoRA: bitsandbytes quantizes linear layers to {in_words} as they are read; "
                "adapters, embedding and head are not quantized",
                in_words=quantization.in_words,
            )
        )
    if config.adapters is not None:
        lines.append(
            tr(
                "training continues from the adapter {adapters}; {reference_words}",
                adapters=config.adapters,
                reference_words=reference_words(config),
            )
        )
    return lines


def _layout(config: Config, facts: Facts, plan: MemoryPlan) -> list[str]:
    """The machine that is planned, and what of a whole model's states one of its GPUs holds."""
    layout = facts.layout
    if layout.is_here:
        vllm = _engine(config, facts) if facts.machine.cuda else []
        is_parked = facts.machine.cuda and any(getattr(config, name) for name in OFFLOADS)
        parked = [tr("{size} are offloaded to CPU memory", size=size(plan.host_bytes))] if is_parked else []
        return [*vllm, *parked]
    gpus = counted(layout.num_gpus, "GPU")
    lines = [
        tr(
            "{gpus} of {size} ({gpu_bytes:.4g} GiB); {in_words}",
            gpus=gpus,
            size=size(layout.gpu_bytes),
            gpu_bytes=layout.gpu_bytes / 2**30,
            in_words=layout.in_words(),
        )
    ]
    lines += [*_forecast_alone(config, layout), *_engine(config, facts)]
    if config.tuner_type != "lora" and facts.model.num_parameters is not None:
        ours, theirs = (state_bytes(facts.model.num_parameters, layout, n) for n in (4, 2))
        lines.append(
            tr(
                "model states {size} per GPU; {theirs} ({theirs_gib:.4g} GiB) with 2-byte "
                "gradients, as DeepSpeed's estimator counts",
                size=size(ours),
                theirs=size(theirs),
                theirs_gib=theirs / 2**30,
            )
            if ours
            else tr("model states: all in the machine's memory, none on a GPU")
        )
    if plan.host_bytes:
        num_bytes = plan.host_bytes // layout.num_machines
        lines.append(
            tr(
                "{size} in a machine's memory; {margin} with the margin that DeepSpeed's estimator adds",
                size=size(num_bytes),
                margin=size(round(HOST_MARGIN * num_bytes)),
            )
        )
    return lines


def _forecast_alone(config: Config, layout: Layout) -> list[str]:
    """Return lines that name the options of `covey train` for a layout that was typed in other words."""
    lines = []
    if layout.engine == "server" and not config.rollout_servers:
        lines.append(
            tr(
                "`covey train` also takes where the servers are: --rollout_servers http://HOST:PORT "
                "--rollout_token_file FILE"
            )
        )
    if layout.zero_stage and not layout.fsdp and config.deepspeed is None:
        word = flags({"deepspeed": deepspeed_word(layout.zero_stage, layout.offload)})
        lines.append(
            tr(
                "planned with options that only `covey plan` has; `covey train` takes {word} for it",
                word=word,
            )
        )
    return lines


def _engine(config: Config, facts: Facts) -> list[str]:
    """What vLLM's share of a GPU has room for."""
    layout, model = facts.layout, facts.model.sizes
    if layout.engine != "colocate" or model is None:
        return []
    spans = max(1, layout.engine_parallel)
    is_typed = config.vllm_gpu_memory_utilization is not None
    solved = (
        ""
        if is_typed
        else tr(
            "; a share of {engine_share:g}, chosen by covey (vllm_gpu_memory_utilization is not set)",
            engine_share=layout.engine_share,
        )
    )
    how = training_of(config, facts, recompute_of(config, facts))
    weights = weight_bytes(model, how, layout)
    cache = max(0, layout.engine_bytes - weights)
    shares = min(spans, model.kv_heads)
    tokens = cache * shares // key_bytes(model, how.element)
    return [
        tr(
            "vLLM's {size} of each GPU: {weights} of weights and {cache} of KV cache, about "
            "{tokens:,} tokens in each engine of {gpus}{solved}",
            size=size(layout.engine_bytes),
            weights=size(weights),
            cache=size(cache),
            tokens=tokens,
            gpus=counted(spans, "GPU"),
            solved=solved,
        ),
        UNTRIED,
    ]


def _step(config: Config, layout: Layout) -> list[str]:
    """How the micro-batches of a step are summed and clipped where DeepSpeed could do it too."""
    if config.deepspeed is None or layout.fsdp or layout.zero_stage == 0:
        return []
    norm = (
        tr("clips them to norm {max_grad_norm:g}", max_grad_norm=config.max_grad_norm)
        if config.max_grad_norm
        else tr("clips nothing")
    )
    return [
        tr(
            "covey sums the gradients of a step ({per_device_train_batch_size} x "
            "{gradient_accumulation_steps} rows a process) in float32, checks that they are finite,",
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        ),
        tr(
            "{norm}, then calls DeepSpeed's optimizer step once; DeepSpeed's own accumulation and "
            "clipping are off",
            norm=norm,
        ),
    ]


def _ends(config: Config, facts: Facts) -> list[str]:
    words = joined(", ", [f"{word!r}" for word in config.stop_words])
    in_text = [tr("the stop words {words}", words=words)] if config.stop_words else []
    return [*([facts.template.stop_tokens] if facts.template.stop_tokens else []), *in_text]


def _sampling(config: Config, facts: Facts) -> list[str]:
    """Describe how tokens are drawn, if filters are set or the model's own settings are not followed."""
    unused = ", ".join(f"{name} {value:g}" for name, value in facts.model.unused_sampling)
    filters, at = filters_of(config), f"{config.temperature:g}"
    if not unused and not filters and not facts.template.banned_tokens:
        return []
    lines = [tr("from all tokens at temperature {temperature}", temperature=at)]
    if filters:
        own = tr("at temperature {temperature} with {filters}", temperature=at, filters=in_words(filters))
        kept = tr("the tokens that filters keep are recorded, and the loss uses the probabilities among them")
        lines = [own, kept]
    if unused:
        ignored = tr("ignored from generation_config.json: {unused}", unused=unused)
        lines[0] = tr("{own}; {ignored}", own=lines[0], ignored=ignored)
        typed = {n: v for n, v in facts.model.unused_sampling if n in FACTS and _is_of_range(n, v)}
        if typed and not engine_problems(config.model_copy(update=typed), facts):
            lines.append(tr("to sample as it says: {typed}", typed=flags(typed)))
    if banned := facts.template.banned_tokens:
        lines.append(tr("never sampled: {banned}", banned=banned))
    return lines


def _is_of_range(name: str, value: float) -> bool:
    bounds = FACTS[name].bounds
    return value > 0 and (bounds is None or bounds.accept(value))


def _splits(batch: BatchPlan) -> list[str]:
    """The equivalent (B, A) pairs, at most six of them, those around the chosen one."""
    splits = batch.equivalent_splits()
    chosen = splits.index((batch.per_device_train_batch_size, batch.gradient_accumulation_steps))
    start = max(0, min(chosen - _SPLITS // 2, len(splits) - _SPLITS))
    shown = splits[start : start + _SPLITS]
    if len(splits) == 1:
        return []
    words = ", ".join(f"{b} x {a}" for b, a in shown)
    return [
        tr(
            "other per_device_train_batch_size x gradient_accumulation_steps that give the same run, "
            "with other memory and speed:"
        ),
        words,
    ]


def reference_words(config: Config) -> str:
    """Return what the KL term of a run that starts from an adapter compares with."""
    if not has_kl(config):
        return tr("no reference, since beta is 0")
    if config.ref_adapters == BASE:
        return tr("reference: the model without the adapter (--ref_adapters base)")
    if config.ref_adapters == START:
        return tr("reference: the adapter as it is at the start (--ref_adapters start)")
    return tr("reference: the adapter {ref_adapters}", ref_adapters=config.ref_adapters)
