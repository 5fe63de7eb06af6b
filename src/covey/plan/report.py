"""What a run is going to do, in lines for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from covey.config.quantization import quantization_of
from covey.config.resolve import not_built_yet
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.plan.check_pass_rates import histogram
from covey.plan.check_start import reference_words
from covey.plan.check_vllm import UNTRIED
from covey.plan.disk import disk_plan, size
from covey.plan.facts import Facts
from covey.plan.ladder import Ladder
from covey.plan.layout import HOST_MARGIN, WEIGHT_BYTES, Layout, deepspeed_word, state_bytes
from covey.plan.levers import OFFLOADS
from covey.plan.memory import MemoryPlan, memory_plan, reward_model_bytes
from covey.plan.publish import publish_plan
from covey.plan.reasons import REASONS
from covey.plan.shape import counted
from covey.plan.words import flags
from covey.plan.works import Works
from covey.types import Problem

_SPLITS = 6


def report_lines(
    config: Config,
    facts: Facts,
    batch: BatchPlan,
    *,
    brief: bool = False,
    ladder: Ladder | None = None,
    works: Works | None = None,
) -> list[str]:
    """Return the plan as lines, each behind a word of at most ten letters; `brief` leaves out the parts of
    the memory."""
    forecast = memory_plan(config, facts)
    memory = forecast.in_words()
    publish = publish_plan(config, facts)
    # Of a GPU's share the layout says it.
    engine = [] if publish is None or publish.way == "gpu" else [publish.memory_in_words()]
    sections = {
        "model": _model(config, facts),
        "ends at": [facts.stop_tokens] if facts.stop_tokens else [],
        "sampling": _sampling(config, facts),
        "data": _data(config, facts),
        "tasks": _tasks(config, facts),
        "rates": _pass_rates(config, facts),
        "rewards": _rewards(config, facts),
        "batch": batch.in_words(),
        "select": _selection(config, batch),
        "same run": _splits(batch),
        "eval": _evaluation(config, facts),
        "publish": [] if publish is None else publish.in_words(),
        "layout": [*_layout(config, facts, forecast), *_step(config, facts.layout)],
        "memory": [*(memory[-1:] if brief else memory), *engine],
        "ladder": [] if ladder is None else ladder.in_words(),
        "works": [] if works is None else works.in_words(),
        "disk": disk_plan(config, facts).in_words(),
        "prompt 0": [repr(facts.first_prompt)] if facts.first_prompt is not None else [],
    }
    return [
        f"{name if number == 0 else '':<10}{line}"
        for name, lines in sections.items()
        for number, line in enumerate(lines)
    ]


def report_json(
    config: Config,
    facts: Facts,
    batch: BatchPlan,
    notes: Sequence[Problem] = (),
    ladder: Ladder | None = None,
    works: Works | None = None,
) -> dict[str, Any]:
    """Return the plan as `covey plan --json` prints it and plan.json holds it."""
    parts = {"ladder": ladder, "works": works, "publish": publish_plan(config, facts)}
    return {name: part.as_dict() for name, part in parts.items() if part is not None} | {
        "options": config.model_dump(),
        "batch": batch.as_dict(),
        "in_words": batch.in_words(),
        "memory": memory_plan(config, facts).as_dict(),
        "disk": disk_plan(config, facts).as_dict(),
        "lines": report_lines(config, facts, batch, ladder=ladder, works=works),
        "notes": [{"code": p.code, "option": p.option, "seen": p.seen, "why": p.why} for p in notes],
        "facts": asdict(facts),
    }


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _model(config: Config, facts: Facts) -> list[str]:
    weight = "" if facts.num_parameters is None else f": {_millions(facts.num_parameters)} parameters"
    context = "" if facts.model_context is None else f", context {facts.model_context} tokens"
    revision = f" at {config.model_revision}" if config.model_revision else ""
    lines = [f"{config.model}{revision}{weight}{context}"]
    if config.tuner_type == "lora":
        kinds = [name for name, on in (("DoRA", config.use_dora), ("rsLoRA", config.use_rslora)) if on]
        kind = f" ({', '.join(kinds)})" if kinds else ""
        trained = "" if facts.num_trained is None else f"; {_millions(facts.num_trained)} parameters trained"
        share = (
            f" ({facts.num_trained / facts.num_parameters:.2%})"
            if facts.num_trained is not None and facts.num_parameters
            else ""
        )
        targets = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in config.target_modules))
        lines.append(
            f"LoRA{kind} on {targets}, rank {config.lora_rank}, alpha {config.lora_alpha:g}{trained}{share}"
        )
        quantization = quantization_of(config)
        if quantization is not None:
            lines.append(
                f"QLoRA: bitsandbytes quantizes linear layers to {quantization.in_words} as they are read; "
                "adapters, embedding and head are not quantized"
            )
        if config.adapters is not None:
            lines.append(f"training continues from the adapter {config.adapters}; {reference_words(config)}")
    else:
        lines.append("all weights are trained")
    return lines


def _layout(config: Config, facts: Facts, plan: MemoryPlan) -> list[str]:
    """The machine that is planned, and what of a whole model's states one of its GPUs holds."""
    layout = facts.layout
    if layout.is_here:
        vllm = _engine(config, facts) if facts.cuda else []
        is_parked = facts.cuda and any(getattr(config, name) for name in OFFLOADS)
        parked = [f"{size(plan.host_bytes)} are offloaded to CPU memory"] if is_parked else []
        return [*vllm, *parked]
    gpus = counted(layout.num_gpus, "GPU")
    lines = [f"{gpus} of {size(layout.gpu_bytes)} ({layout.gpu_bytes / 2**30:.4g} GiB); {layout.in_words()}"]
    lines += [*_forecast_alone(config, layout), *_engine(config, facts)]
    if config.tuner_type != "lora" and facts.num_parameters is not None:
        ours, theirs = (state_bytes(facts.num_parameters, layout, n) for n in (4, 2))
        lines.append(
            f"model states {size(ours)} a GPU; with gradients of 2 bytes, as DeepSpeed's estimator counts, "
            f"{size(theirs)} ({theirs / 2**30:.4g} GiB)"
            if ours
            else "model states: none stay on a GPU, all lie in the machine's memory"
        )
    if plan.host_bytes:
        margin = size(round(HOST_MARGIN * plan.host_bytes))
        lines.append(f"in the machine's memory {size(plan.host_bytes)}, with DeepSpeed's margin {margin}")
    return lines


def _forecast_alone(config: Config, layout: Layout) -> list[str]:
    """What of a layout `covey train` does not have, or has another option for."""
    lines = []
    asked = not_built_yet(config)
    if layout.engine == "colocate" and layout.engine_parallel > 1:
        lines.append("a forecast only: `covey train` has a vLLM over several GPUs in servers alone")
    if asked:
        lines.append(f"a forecast only: `covey train` does not have {', '.join(asked)} yet")
    if layout.zero_stage and not layout.fsdp and config.deepspeed is None:
        word = flags({"deepspeed": deepspeed_word(layout.zero_stage, layout.offload)})
        lines.append(f"planned by options of `covey plan`; in a run this is {word}")
    return lines


def _engine(config: Config, facts: Facts) -> list[str]:
    """What vLLM's share of a GPU has room for."""
    layout, model = facts.layout, facts.model_sizes
    if layout.engine != "colocate" or model is None:
        return []
    spans = max(1, layout.engine_parallel)
    is_typed = config.vllm_gpu_memory_utilization is not None
    solved = "" if is_typed else f"; a share of {layout.engine_share:g}, which nobody has typed"
    weights = WEIGHT_BYTES * model.parameters // spans
    cache = max(0, layout.engine_bytes - weights)
    tokens = cache * spans // (2 * WEIGHT_BYTES * model.layers * model.kv_heads * model.head_width)
    return [
        f"vLLM's {size(layout.engine_bytes)} of each GPU: {size(weights)} of weights and {size(cache)} of KV "
        f"cache, about {tokens:,} tokens in each engine of {counted(spans, 'GPU')}{solved}",
        UNTRIED,
    ]


def _step(config: Config, layout: Layout) -> list[str]:
    """How the micro-batches of a step are summed and clipped where DeepSpeed could do it too."""
    if config.deepspeed is None or layout.fsdp or layout.zero_stage == 0:
        return []
    norm = f"clips them to norm {config.max_grad_norm:g}" if config.max_grad_norm else "clips nothing"
    return [
        f"covey sums the gradients of a step ({config.per_device_train_batch_size} x "
        f"{config.gradient_accumulation_steps} rows a process) in float32, checks that they are finite,",
        f"{norm}, and asks DeepSpeed for one step; DeepSpeed's own accumulation and clipping are off",
    ]


def _sampling(config: Config, facts: Facts) -> list[str]:
    unused = ", ".join(f"{name} {value:g}" for name, value in facts.unused_sampling)
    if not unused:
        return []
    own = f"from all tokens at temperature {config.temperature:g}"
    return [f"{own}; not followed of generation_config.json: {unused}"]


def _data(config: Config, facts: Facts) -> list[str]:
    if config.replay_rollouts is not None:
        return [f"rollouts of {config.replay_rollouts}; nothing is sampled"]
    if config.streaming:
        return ["read as it is needed; longer prompts are left out as they come", *facts.data_notes]
    rows = "" if facts.num_rows is None else f"{counted(facts.num_rows, 'row')}, "
    lines = [f"{rows}{counted(facts.num_prompts or 0, 'prompt')} used"]
    if facts.longest_prompt:
        lines[0] += f", the longest of {counted(facts.longest_prompt, 'token')}"
    for left in facts.left_out:
        where = ", ".join(map(str, left.rows))
        verb = "" if left.reason == "cut" else "left out: "
        verb += f"of {left.where}, " if left.where else ""
        some = " ..." if left.count > len(left.rows) else ""
        lines.append(
            f"{verb}{counted(left.count, 'row')} {REASONS.get(left.reason, left.reason)}"
            + (f" (row {where}{some})" if where else "")
        )
    if facts.golds is not None:
        lines.append(
            f"gold answers: {facts.golds.num_checked - facts.golds.num_bad:,} of "
            f"{facts.golds.num_checked:,} can be read"
        )
    return [*lines, *facts.data_notes]


def _tasks(config: Config, facts: Facts) -> list[str]:
    """The rows of each task, and what scores them."""
    named = config.task_rewards or {}
    return [
        f"{task}: {counted(count, 'prompt')}{', by ' + ' + '.join(named[task]) if named.get(task) else ''}"
        for task, count in facts.tasks.items()
    ]


def _pass_rates(config: Config, facts: Facts) -> list[str]:
    """Where pass rates are from, what is left out by them, and how they are spread."""
    rates = facts.pass_rates
    if rates is None or rates.problem is not None:
        return []
    low, high = config.min_pass_rate, config.max_pass_rate
    left = rates.num_rows - rates.num_kept
    lines = [
        f"{rates.where}: {rates.num_measured:,} of {counted(rates.num_rows, 'prompt')} measured, the others "
        f"are kept; {left:,} left out, below {low:g} or above {high:g}",
        f"by pass rate: {histogram(rates) or 'none'}",
    ]
    return [*lines, *([f"each epoch {config.curriculum}"] if config.curriculum != "none" else [])]


def _rewards(config: Config, facts: Facts) -> list[str]:
    pairs = zip(config.rewards, config.reward_weights, strict=True)
    return [
        " + ".join(f"{weight:g} x {name}" for name, weight in pairs),
        *_models(facts),
        *facts.reward_notes,
    ]


def _models(facts: Facts) -> list[str]:
    """The reward models, each in a process of its own beside each training process."""
    return [
        f"reward model {m.name}: {_millions(m.parameters)} parameters"
        + ("" if m.context is None else f", context {m.context} tokens")
        + f"; a process of its own, about {size(reward_model_bytes(m, cuda=bool(facts.cuda)))}"
        for m in facts.reward_models
        if m.problem is None and m.is_here
    ]


def _selection(config: Config, batch: BatchPlan) -> list[str]:
    """What takes the place of groups without signal, and what that costs at most."""
    lines = []
    if config.dynamic_sample:
        planned, times = batch.completions_per_rollout, config.max_resample_times
        lines.append(
            f"groups without signal are replaced, in up to {counted(times, 'further draw')}: a rollout "
            f"samples {planned:,} to {planned * (1 + times):,} completions"
        )
    if config.replay_buffer_size:
        kept = counted(config.replay_buffer_size, "group")
        lines.append(f"what then has no signal is replayed from the strongest {kept} of earlier rollouts")
    return lines


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
        "per_device_train_batch_size x gradient_accumulation_steps, where memory and speed differ:",
        words,
    ]


def _evaluation(config: Config, facts: Facts) -> list[str]:
    if config.eval_strategy == "no" or not facts.eval_sets:
        return []
    when = f"every {config.eval_steps} steps" if config.eval_strategy == "steps" else "after each epoch"
    start = "before the first step, " if config.eval_on_start else ""
    sets = ", ".join(f"{s.name} ({counted(s.num_prompts, 'prompt')})" for s in facts.eval_sets)
    each = counted(config.num_generations_eval, "completion")
    heat = f"{config.eval_temperature:g}"
    return [f"{sets}: {start}{when} and at the end; {each} a prompt at temperature {heat}"]
