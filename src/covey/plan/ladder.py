"""The layouts next to the one that is planned: one change each, with the memory it takes and what it costs.

Downwards are changes that take less memory, upwards those that give speed back. The order is the cost in
speed, from what the sources say of each:

    float32 to bfloat16       none: products are faster (other numbers in the forward pass)
    ZeRO-1, ZeRO-2            none: as much traffic as DDP (arXiv:1910.02054, section 7)
    a smaller engine share    fewer completions side by side
    an engine that sleeps     its weights travel once a rollout
    half the micro-batch      twice the calls of half the size
    selective recomputation   all but matrix products again
    recomputation             a third more arithmetic (arXiv:2205.05198)
    ZeRO-3                    half as much traffic again, in every pass
    FSDP over all machines    from hybrid_shard: that traffic goes between machines
    offload_reference         its weights over the bus once a rollout
    offload_model             masters and moments over the bus once a rollout
    offload_optimizer         masters and moments over the bus in every step
    DeepSpeed: optimizer      the step on the CPU, gradients and weights over its bus
    DeepSpeed: weights too    every layer over the bus in every pass
    8-bit moments             none, but they round: another run
    LoRA                      none, but it is another run
    QLoRA                     each product dequantizes its weight, and it is another run
    shorter completions       none, but what is longer is cut: last

Numbers below are places in that order, not times; those of two changes add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from covey.config.objects import is_live
from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.fixes import edits_to
from covey.plan.layout import Layout, Offload, states_typed
from covey.plan.levers import lever_edits
from covey.plan.memory import MemoryPlan, memory_plan, recompute_of
from covey.plan.recompute import KINDS, Recompute
from covey.plan.shape import COUNTS, shape_of, with_product
from covey.plan.words import flags
from covey.texts import joined, padded, tr
from covey.types import Fix

SHORTEST = 16
Edits = dict[str, Any]

_OF_STAGE = (0.0, 0.5, 1.0, 10.0)
_OF_OFFLOAD: dict[Offload, float] = {"none": 0.0, "optimizer": 14.0, "params": 20.0}
_OF_RECOMPUTE: dict[Recompute, float] = {"none": 0.0, "selective": 6.0, "full": 8.0}
_OF_HALVING, _OF_SHARE, _OF_SLEEP, _OF_LORA, _OF_QLORA = 4.0, 2.0, 3.0, 100.0, 150.0
_OF_LEVER = {"offload_reference": 11.0, "offload_model": 12.0, "offload_optimizer": 13.0, "optim": 60.0}
# Without stage 1, which runs as stage 2 in bfloat16.
_STATES: tuple[tuple[int, Offload], ...] = (
    (0, "none"),
    (2, "none"),
    (3, "none"),
    (2, "optimizer"),
    (3, "optimizer"),
    (3, "params"),
)
_STATES_OF_FSDP: tuple[tuple[int, Offload], ...] = ((2, "params"),)
# FSDP, from a whole model in each process. It comes just before ZeRO-3, which needs another package.
_BY_FSDP: dict[Offload, Edits] = {
    "none": {"fsdp": "full_shard"},
    "params": {"fsdp": "full_shard", "fsdp_offload": True},
}
_BEFORE_ZERO_3 = 0.5
_OF_HALF_LENGTH, _OFFERED = 200.0, 3
_WORDS = {
    "dtype": tr("use half the bytes for weights and activations"),
    "passes": tr("the same run in smaller forward passes"),
    "recompute": tr("the same run, with activations recomputed in the backward pass"),
    "offload_reference": tr("keep the reference in CPU memory except while it is used"),
    "offload_model": tr("during rollouts, move everything that sampling does not need to CPU memory"),
    "offload_optimizer": tr("keep the optimizer state in CPU memory except during each step"),
    "optim": tr("use 8-bit moments, whose rounding changes the results"),
    "tuner": tr("train only adapters (LoRA)"),
    "quantized": tr("quantize the base model and train only adapters on it (QLoRA)"),
    "length": tr("allow only shorter completions"),
    "states": "",
    "engine": "",
    "sleep": "",
}
_LEAST_SHARE, _MOST_SHARE, _SHARE_STEP = 0.2, 0.9, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one thing, `kind`: what is typed, and what it makes of the configuration's options and of
    the layout's fields.

    `cost` is its place in the order above; below 0 it gives speed.
    """

    kind: str
    typed: Edits
    options: Edits
    layout: Edits
    cost: float

    @property
    def words(self) -> str:
        """What the change is, for people."""
        return joined("; ", [_WORDS[kind] for kind in self.kind.split("+")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A layout: the options that are typed to have it, with what they are in words, its peak on one GPU, and
    whether that is within the limit."""

    typed: Edits
    words: str
    cost: float
    peak_bytes: int
    binding: str
    share: float
    fits: bool

    def in_words(self) -> str:
        """The layout as one line, without what is typed."""
        verdict = tr("fits") if self.fits else tr("does not fit")
        return tr(
            "{size} in {binding}, {share:.0%}: {verdict}",
            size=size(self.peak_bytes),
            binding=self.binding,
            share=self.share,
            verdict=verdict,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The layout that is planned, those above and below it, nearest first, and the least costly that fits:
    of one change, else of two; None where none does, or where the planned one does."""

    here: Rung
    up: tuple[Rung, ...]
    down: tuple[Rung, ...]
    smallest: Rung | None

    def as_dict(self) -> dict[str, Any]:
        """Return the layouts as `covey plan --json` prints them."""

        def rung(of: Rung) -> dict[str, Any]:
            words = {name: getattr(of, name) for name in ("typed", "peak_bytes", "binding", "share", "fits")}
            return words | {"flags": flags(of.typed)}

        return {
            "here": rung(self.here),
            "up": [rung(r) for r in self.up],
            "down": [rung(r) for r in self.down],
            "smallest": None if self.smallest is None else rung(self.smallest),
        }

    def in_words(self) -> list[str]:
        """Return the layouts as lines, the fastest first."""
        rungs = [(tr("faster"), r) for r in reversed(self.up)] + [(tr("as planned"), self.here)]
        rungs += [(tr("less memory"), r) for r in self.down]
        lines = [
            joined("", [padded(name, 12), padded(r.in_words(), 45 if r.typed else 0), flags(r.typed)])
            for name, r in rungs
        ]
        if self.here.fits:
            return [*lines, tr("the plan fits as it is")]
        if self.smallest is None:
            return [*lines, tr("no change of one or two of these fits")]
        return [*lines, tr("the smallest change that fits: {flags}", flags=flags(self.smallest.typed))]


def ladder(config: Config, facts: Facts, typed: Collection[str] | None = None) -> Ladder | None:
    """Return the layouts around a configuration; None where its memory is not known."""
    plan = memory_plan(config, facts)
    limit = plan.limit_bytes
    if not plan.phases or not limit:
        return None
    changes = list(_changes(config, facts, typed))
    tried = {id(change): _rung(config, facts, change, limit) for change in changes}
    down = [c for c in changes if c.cost > 0]
    here = _of(plan, None, limit)
    # What does not lower the peak is no rung; beside another change it may help.
    less = [c for c in down if c.kind not in _OF_LEVER or tried[id(c)].peak_bytes < here.peak_bytes]
    return Ladder(
        here=here,
        up=_shown([(c, tried[id(c)]) for c in changes if c.cost < 0]),
        down=_shown([(c, tried[id(c)]) for c in less]),
        smallest=None if here.fits else _smallest(config, facts, down, [tried[id(c)] for c in down], limit),
    )


def ladder_fixes(config: Config, facts: Facts, typed: Collection[str] | None, limit: int) -> tuple[Fix, ...]:
    """Return the least costly layouts that take no more bytes than `limit`: of one change, else the one of
    two."""
    changes = [c for c in _changes(config, facts, typed) if c.cost > 0]
    tried = [_rung(config, facts, c, limit) for c in changes]
    fitting = [rung for rung in _shown(list(zip(changes, tried, strict=True))) if rung.fits][:_OFFERED]
    if not fitting:
        smallest = _smallest(config, facts, changes, tried, limit)
        fitting = [] if smallest is None else [smallest]
    is_here = facts.layout.is_here
    return tuple(Fix(text=r.words if is_here else r.in_words(), edits=r.typed) for r in fitting)


def _smallest(
    config: Config, facts: Facts, changes: list[Change], tried: list[Rung], limit: int
) -> Rung | None:
    fitting = [rung for rung in tried if rung.fits]
    if fitting:
        return min(fitting, key=lambda rung: rung.cost)
    pairs = [_both(a, b) for a, b in combinations(changes, 2) if _go_together(a.kind, b.kind)]
    rungs = (_rung(config, facts, pair, limit) for pair in sorted(pairs, key=lambda pair: pair.cost))
    return next((rung for rung in rungs if rung.fits), None)


def _go_together(one: str, other: str) -> bool:
    """Whether changes of two kinds make one layout: quantized weights are not split, and come with LoRA."""
    kinds = {one, other}
    return one != other and not ("quantized" in kinds and kinds & {"tuner", "states"})


def _both(first: Change, second: Change) -> Change:
    return Change(
        kind=f"{first.kind}+{second.kind}",
        typed=first.typed | second.typed,
        options=first.options | second.options,
        layout=first.layout | second.layout,
        cost=first.cost + second.cost,
    )


def _shown(tried: list[tuple[Change, Rung]]) -> tuple[Rung, ...]:
    """Of each kind the nearest that fits, else the furthest; all of the states, nearest first."""
    best: dict[Any, Rung] = {}
    for change, rung in sorted(tried, key=lambda pair: abs(pair[0].cost)):
        key = (change.kind, change.cost if change.kind == "states" else 0)
        if key not in best or not best[key].fits:
            best[key] = rung
    return tuple(sorted(best.values(), key=lambda rung: abs(rung.cost)))


def _rung(config: Config, facts: Facts, change: Change, limit: int) -> Rung:
    facts = replace(facts, layout=replace(facts.layout, **change.layout))
    plan = memory_plan(config.model_copy(update=change.options), facts)
    return _of(plan, change, limit)


def _of(plan: MemoryPlan, change: Change | None, limit: int) -> Rung:
    return Rung(
        typed={} if change is None else change.typed,
        words="" if change is None else change.words,
        cost=0.0 if change is None else change.cost,
        peak_bytes=plan.needed_bytes,
        binding=plan.binding.name,
        share=plan.share,
        fits=plan.needed_bytes <= limit,
    )


def _changes(config: Config, facts: Facts, typed: Collection[str] | None) -> Iterator[Change]:
    def option(kind: str, typed: Edits, cost: float, options: Edits | None = None) -> Change:
        return Change(kind=kind, typed=typed, options=options or typed, layout={}, cost=cost)

    if config.torch_dtype == "float32" and facts.machine.cuda:
        yield option("dtype", {"torch_dtype": "bfloat16"}, 0.1)
    for number, (edits, counts) in enumerate(smaller_passes(config, facts, typed), start=1):
        yield option("passes", edits, _OF_HALVING * number, counts)
    larger = _larger_pass(config, facts, typed)
    if larger is not None:
        yield option("passes", larger[0], -_OF_HALVING, larger[1])
    if config.gradient_checkpointing != "auto":
        now = recompute_of(config, facts)
        for kind in KINDS:
            cost = _OF_RECOMPUTE[kind] - _OF_RECOMPUTE[now]
            if kind != now:
                yield option("recompute", {"gradient_checkpointing": typed_as(kind)}, cost)
    for edits in lever_edits(config, facts.layout) if facts.machine.cuda or not facts.layout.is_here else ():
        (name,) = edits
        yield option(name, edits, _OF_LEVER[name])
    if config.tuner_type != "lora":
        yield option("tuner", {"tuner_type": "lora"}, _OF_LORA)
    if _can_quantize(config, facts):
        lora: Edits = {} if config.tuner_type == "lora" else {"tuner_type": "lora"}
        edits = {**lora, "quant_bits": "4"}
        yield option("quantized", edits, _OF_QLORA, {**edits, "quant_method": "bnb"})
    length, cost = config.max_completion_length // 2, _OF_HALF_LENGTH
    while length >= SHORTEST:
        yield option("length", {"max_completion_length": length}, cost)
        length, cost = length // 2, cost + _OF_HALF_LENGTH
    if not facts.layout.is_here:
        if quantization_of(config) is None:
            yield from _of_states(facts.layout)
        yield from _of_engine(facts.layout)


def _can_quantize(config: Config, facts: Facts) -> bool:
    """Whether the weights may be quantized: each process holds the model, which is read from its files."""
    is_whole = not facts.layout.fsdp and not facts.layout.zero_stage
    return is_whole and config.quant_bits is None and not is_live(config.model)


def _of_states(layout: Layout) -> Iterator[Change]:
    """Where weights, gradients and optimizer state are; one process has nothing to split."""
    now = _OF_STAGE[layout.zero_stage] + _OF_OFFLOAD[layout.offload]
    states = [*_STATES, *_STATES_OF_FSDP] if layout.fsdp else _STATES
    for stage, offload in states:
        cost = _OF_STAGE[stage] + _OF_OFFLOAD[offload] - now
        edits = states_typed(layout, stage, offload)
        if edits and (layout.num_gpus > 1 or offload != "none" or cost < 0):
            fields = {"zero_stage": stage, "offload": offload, "fsdp": layout.fsdp and stage > 0}
            yield Change(kind="states", typed=edits, options={}, layout=fields, cost=cost)
    if layout.shard_gpus:
        fields = {"shard_gpus": 0}
        yield Change(kind="states", typed=_BY_FSDP["none"], options={}, layout=fields, cost=_OF_STAGE[3])
    if layout.num_gpus > 1 and now == 0:
        for offload, typed in _BY_FSDP.items():
            fields = {"zero_stage": 3, "offload": offload, "fsdp": True}
            cost = _OF_STAGE[3] + _OF_OFFLOAD[offload] - _BEFORE_ZERO_3
            yield Change(kind="states", typed=typed, options={}, layout=fields, cost=cost)


def _of_engine(layout: Layout) -> Iterator[Change]:
    if layout.engine != "colocate":
        return
    for number in range(-8, 9):
        share = round(layout.engine_share - number * _SHARE_STEP, 2)
        if number and _LEAST_SHARE <= share <= _MOST_SHARE:
            yield Change(
                kind="engine",
                typed={"vllm_gpu_memory_utilization": share},
                options={},
                layout={"engine_share": share},
                cost=_OF_SHARE * number,
            )
    sleeps = not layout.engine_sleeps
    yield Change(
        kind="sleep",
        typed={"vllm_enable_sleep_mode": sleeps},
        options={},
        layout={"engine_sleeps": sleeps},
        cost=_OF_SLEEP if sleeps else -_OF_SLEEP,
    )


def typed_as(kind: Recompute) -> str:
    """How such a recomputation is typed."""
    return {"none": "false", "selective": "selective", "full": "true"}[kind]


def smaller_passes(
    config: Config, facts: Facts, typed: Collection[str] | None
) -> Iterator[tuple[Edits, Edits]]:
    """Forward passes of fewer rows, largest first, with as many more of them: what is typed, and all counts
    that follow. None where a file of DeepSpeed says how many rows they have."""
    tokens = config.max_tokens_per_micro_batch
    while tokens is not None and tokens > SHORTEST:
        tokens //= 2
        yield {"max_tokens_per_micro_batch": tokens}, {"max_tokens_per_micro_batch": tokens}
    if tokens is not None or _has_rows(facts):
        return
    rows = config.per_device_train_batch_size
    for fewer in (n for n in range(rows - 1, 0, -1) if rows % n == 0):
        yield _with_rows(config, facts, typed, fewer)


def _larger_pass(config: Config, facts: Facts, typed: Collection[str] | None) -> tuple[Edits, Edits] | None:
    """Forward passes of twice the rows and half as many, where their number is even."""
    if config.max_tokens_per_micro_batch is not None:
        twice: Edits = {"max_tokens_per_micro_batch": 2 * config.max_tokens_per_micro_batch}
        return twice, twice
    if _has_rows(facts) or config.gradient_accumulation_steps % 2 or config.steps_per_generation % 2:
        return None
    return _with_rows(config, facts, typed, 2 * config.per_device_train_batch_size)


def _has_rows(facts: Facts) -> bool:
    file = facts.layout.file
    return file is not None and file.has_rows


def _with_rows(config: Config, facts: Facts, typed: Collection[str] | None, rows: int) -> tuple[Edits, Edits]:
    """As many rows a step and a rollout, in forward passes of `rows`."""
    shape = shape_of(config, facts.launch.num_processes)
    before = shape.per_device_train_batch_size
    target = with_product(
        shape,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=shape.gradient_accumulation_steps * before // rows,
        steps_per_generation=shape.steps_per_generation * before // rows,
    )
    return edits_to(shape, target, typed), {name: getattr(target, name) for name in COUNTS}
