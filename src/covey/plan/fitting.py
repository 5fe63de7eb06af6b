"""Changes with which a run that is too large fits, each by the forecast of every run: the least costly first.

`_COSTS` has the order. It ranks the cost in speed and is no time; first come changes that keep the results.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from covey.config.objects import is_live
from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.check_layout import layout_problems
from covey.plan.deepspeed import states_of
from covey.plan.deepspeed_file import from_content
from covey.plan.disk import size
from covey.plan.engine_share import with_engine_share
from covey.plan.facts import Facts
from covey.plan.fixes import edits_to
from covey.plan.layout import Layout, Offload, States, layout_of, states_typed
from covey.plan.levers import lever_edits
from covey.plan.memory import MemoryPlan, memory_plan, recompute_of
from covey.plan.recompute import TYPED
from covey.plan.shape import COUNTS, shape_of, with_product
from covey.texts import joined, tr
from covey.types import Fix, Problem

MOST = 3
"""Changes that are named at the most."""

SHORTEST = 16
"""Tokens of a completion or a forward pass that are proposed at the least."""

WHOLE: dict[str, Any] = {"deepspeed": None, "fsdp": None, "fsdp_offload": False, "fsdp_config": None}
"""The options of a run whose processes hold a whole model each."""

_COSTS = {
    "dtype": 0.1,  # none: products are faster, with other numbers in the forward pass
    "share": 2.0,  # for each tenth of a GPU: fewer completions side by side
    "sleep": 3.0,  # vLLM's weights travel once a rollout
    "passes": 4.0,  # for each halving: twice the calls of half the size
    "selective": 6.0,  # all but matrix products again
    "full": 8.0,  # a third more arithmetic (arXiv:2205.05198)
    "machines": 10.0,  # of hybrid_shard: traffic of FSDP goes between machines
    "offload_reference": 11.0,  # its weights over the bus once a rollout
    "offload_model": 12.0,  # masters and moments over the bus once a rollout
    "offload_optimizer": 13.0,  # masters and moments over the bus in each step
    "optim": 60.0,  # moments of 8 bits round: another run
    "lora": 100.0,  # another run
    "quantized": 150.0,  # another run, whose products dequantize their weights
    "length": 200.0,  # for each halving: what is longer is cut
}
# Of ZeRO and FSDP: stages 1 and 2 have the traffic of DDP, stage 3 half as much again (arXiv:1910.02054,
# section 7). Offloaded, the step is on the CPU, and with the weights every layer goes over the bus in a pass.
_COST_OF_STAGE = (0.0, 0.5, 1.0, 10.0)
_COST_OF_OFFLOAD: dict[Offload, float] = {"none": 0.0, "optimizer": 14.0, "params": 20.0}
# Without stage 1, which runs as stage 2 in bfloat16.
_STATES: tuple[tuple[int, Offload], ...] = (
    *((2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "params")),
)
_STATES_OF_FSDP: tuple[tuple[int, Offload], ...] = ((3, "none"), (2, "params"), (3, "params"))
_WORDS = {
    "offload_reference": tr("keep the reference in CPU memory except while it is used"),
    "offload_model": tr("during rollouts, move everything that sampling does not need to CPU memory"),
    "offload_optimizer": tr("keep the optimizer state in CPU memory except during each step"),
    "optim": tr("use 8-bit moments, whose rounding changes the results"),
}
# FSDP from a whole model in each process comes just before ZeRO-3, which needs another package.
_BY_FSDP = ((9.5, {"fsdp": "full_shard"}), (29.5, {"fsdp": "full_shard", "fsdp_offload": True}))
_APART = ({"zero", "fsdp"}, {"quantized", "lora"}, {"quantized", "zero"}, {"quantized", "fsdp"})
_LEAST_SHARE, _TENTH = 0.2, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one kind: the options that are typed for it, all options that it changes, its cost beside
    others, and what it is in words, where the options do not say it."""

    kind: str
    cost: float
    typed: dict[str, Any]
    options: dict[str, Any]
    words: str = ""

    def beside(self, other: Change) -> Change:
        """Return both changes as one."""
        return Change(
            kind=f"{self.kind}+{other.kind}",
            cost=self.cost + other.cost,
            typed=self.typed | other.typed,
            options=self.options | other.options,
            words=joined("; ", [self.words, other.words]),
        )


def fitting_fixes(config: Config, facts: Facts, typed: Collection[str] | None, limit: int) -> tuple[Fix, ...]:
    """Return the least costly changes with which a run takes no more bytes than `limit`: at most three of one
    kind each, else one of two kinds; none where no such change is enough."""
    fixes = []
    for change in fitting_changes(config, facts, typed, limit):
        changed, given = changed_run(config, facts, change.options)
        text = change.words
        if not given.layout.is_here:
            text = peak_in_words(memory_plan(changed, given), given.layout)
        fixes.append(Fix(text=text, edits=change.typed))
    return tuple(fixes)


def fitting_changes(config: Config, facts: Facts, typed: Collection[str] | None, limit: int) -> list[Change]:
    """Return the changes of `fitting_fixes`."""

    known = {problem.code for problem in layout_problems(config, facts)}

    def fits(change: Change) -> bool:
        changed, given = changed_run(config, facts, change.options)
        has_new = any(problem.code not in known for problem in layout_problems(changed, given))
        return not has_new and memory_plan(changed, given).needed_bytes <= limit

    single = sorted(_changes(config, facts, typed), key=lambda change: change.cost)
    found: dict[str, Change] = {}
    for change in single:
        if len(found) < MOST and change.kind not in found and fits(change):
            found[change.kind] = change
    if found:
        return list(found.values())
    pairs = [one.beside(other) for one, other in combinations(single, 2) if _go_together(one, other)]
    return next(([pair] for pair in sorted(pairs, key=lambda pair: pair.cost) if fits(pair)), [])


def _go_together(one: Change, other: Change) -> bool:
    """Whether both can be made at once: quantized weights are not split, and come with LoRA."""
    kinds = {one.kind, other.kind}
    return len(kinds) == 2 and kinds not in _APART


def changed_run(config: Config, facts: Facts, options: dict[str, Any]) -> tuple[Config, Facts]:
    """Return a configuration with other options, and the facts with the layout that it then has."""
    changed, now = config.model_copy(update=options), facts.layout
    if now.is_here and "use_vllm" not in options:
        return changed, facts
    states = States(
        stage=now.zero_stage,
        offload=now.offload,
        file=now.file,
        fsdp=now.fsdp,
        is_hybrid=now.shard_gpus > 0,
    )
    problems: tuple[Problem, ...] = ()
    if options.keys() & WHOLE.keys():
        word = changed.deepspeed or ""
        file = from_content(json.loads(word), word) if word.startswith("{") else None
        states, problems = states_of(changed, file, cuda=bool(facts.machine.cuda))
    layout = layout_of(
        changed,
        now.num_gpus,
        now.gpu_bytes,
        states,
        is_here=now.is_here,
        gpus_of_a_machine=now.machine_gpus or now.shard_gpus,
    )
    launch = replace(facts.launch, layout_problems=problems)
    return changed, with_engine_share(replace(facts, layout=layout, launch=launch), changed)


def peak_in_words(plan: MemoryPlan, layout: Layout) -> str:
    """Return the peak of a GPU, and what lies in the memory of a machine."""
    num_bytes = plan.host_bytes // layout.num_machines
    host = tr("; {size} of a machine's memory", size=size(num_bytes)) if num_bytes else ""
    peak = tr("{size} in {name}", size=size(plan.needed_bytes), name=plan.binding.name)
    return tr("{peak}, {share:.0%} of a GPU{host}", peak=peak, share=plan.share, host=host)


def _changes(config: Config, facts: Facts, typed: Collection[str] | None) -> Iterator[Change]:
    layout = facts.layout
    if config.torch_dtype == "float32" and facts.machine.cuda:
        words = tr("use half the bytes for weights and activations")
        yield _change("dtype", {"torch_dtype": "bfloat16"}, words)
    yield from smaller_passes(config, facts, typed)
    yield from _recomputation(config, facts)
    for edits in lever_edits(config, layout) if facts.machine.cuda or not layout.is_here else ():
        (name,) = edits
        yield _change(name, edits, _WORDS[name])
    yield from _adapters(config, layout)
    words, length, cost = tr("allow only shorter completions"), config.max_completion_length // 2, 0.0
    while length >= SHORTEST:
        cost += _COSTS["length"]
        yield _change("length", {"max_completion_length": length}, words, cost)
        length //= 2
    if not layout.is_here:
        yield from _states(config, layout)
        yield from _engine(layout)


def _change(kind: str, typed: dict[str, Any], words: str = "", cost: float | None = None) -> Change:
    cost = _COSTS[kind] if cost is None else cost
    return Change(kind=kind, cost=cost, typed=typed, options=typed, words=words)


def smaller_passes(config: Config, facts: Facts, typed: Collection[str] | None) -> Iterator[Change]:
    """Return forward passes of fewer rows, largest first, with as many more of them; none where a file of
    DeepSpeed says how many rows they have."""
    words, cost = tr("the same run in smaller forward passes"), 0.0
    tokens, file = config.max_tokens_per_micro_batch, facts.layout.file
    while tokens is not None and tokens > SHORTEST:
        tokens, cost = tokens // 2, cost + _COSTS["passes"]
        yield _change("passes", {"max_tokens_per_micro_batch": tokens}, words, cost)
    if tokens is not None or (file is not None and file.has_rows):
        return
    shape = shape_of(config, facts.launch.num_processes)
    rows = shape.per_device_train_batch_size
    for fewer in (n for n in range(rows - 1, 0, -1) if rows % n == 0):
        cost += _COSTS["passes"]
        target = with_product(
            shape,
            per_device_train_batch_size=fewer,
            gradient_accumulation_steps=shape.gradient_accumulation_steps * rows // fewer,
            steps_per_generation=shape.steps_per_generation * rows // fewer,
        )
        counts = {name: getattr(target, name) for name in COUNTS}
        change = _change("passes", edits_to(shape, target, typed), words, cost)
        yield replace(change, options=counts)


def _recomputation(config: Config, facts: Facts) -> Iterator[Change]:
    """Return what computes more activations again; `auto` has tried all."""
    if config.gradient_checkpointing == "auto":
        return
    words = tr("the same run, with activations recomputed in the backward pass")
    now = _COSTS.get(recompute_of(config, facts), 0.0)
    for kind in ("selective", "full"):
        if _COSTS[kind] > now:
            edits = {"gradient_checkpointing": TYPED[kind]}
            yield _change("recompute", edits, words, _COSTS[kind] - now)


def _adapters(config: Config, layout: Layout) -> Iterator[Change]:
    lora: dict[str, Any] = {} if config.tuner_type == "lora" else {"tuner_type": "lora"}
    if lora:
        yield _change("lora", lora, tr("train only adapters (LoRA)"))
    # Each process quantizes a whole model as it reads its files.
    if layout.fsdp or layout.zero_stage or config.quant_bits is not None or is_live(config.model):
        return
    words = tr("quantize the base model and train only adapters on it (QLoRA)")
    change = _change("quantized", {**lora, "quant_bits": "4"}, words)
    yield replace(change, options={**change.typed, "quant_method": "bnb"})


def _states(config: Config, layout: Layout) -> Iterator[Change]:
    """Return where else weights, gradients and optimizer state may be; one process has nothing to split."""
    if quantization_of(config) is not None:
        return
    kind = "fsdp" if layout.fsdp else "zero"
    now = _COST_OF_STAGE[layout.zero_stage] + _COST_OF_OFFLOAD[layout.offload]
    for stage, offload in _STATES_OF_FSDP if layout.fsdp else _STATES:
        edits = states_typed(layout, stage, offload)
        cost = _COST_OF_STAGE[stage] + _COST_OF_OFFLOAD[offload] - now
        if edits and cost > 0 and (layout.num_gpus > 1 or offload != "none"):
            yield _change(kind, edits, cost=cost)
    if layout.shard_gpus:
        yield _change("fsdp", {"fsdp": "full_shard"}, cost=_COSTS["machines"])
    if layout.num_gpus > 1 and now == 0:
        for cost, edits in _BY_FSDP:
            yield _change("fsdp", edits, cost=cost)


def _engine(layout: Layout) -> Iterator[Change]:
    """Return how vLLM on these GPUs takes less of them."""
    if layout.engine != "colocate":
        return
    share, cost = layout.engine_share, 0.0
    while (share := round(share - _TENTH, 2)) >= _LEAST_SHARE:
        cost += _COSTS["share"]
        yield _change("share", {"vllm_gpu_memory_utilization": share}, cost=cost)
    if not layout.engine_sleeps:
        yield _change("sleep", {"vllm_enable_sleep_mode": True})
