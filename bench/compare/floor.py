"""The least that a step can take: operations and bytes, counted once, over what the machine does at best.

Counted are matrix products and attention, and the bytes of weights, keys and values, gradients and
optimizer state. Activations, norms, sampling, rewards and Python are not: a floor leaves them out.
A prompt counts once a group, and once whatever several completions begin with, in rollout and update alike.
Rows whose advantage is 0 have no gradient and do not count in the update; the head counts where something is
predicted.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Case
from runs import Measured, run_script

Rates = Mapping[str, Mapping[str, Mapping[str, float]]]
# Weights above this many bytes come from memory at every decoded token, smaller ones from the cache.
_CACHE_BYTES = 32 << 20
# AdamW reads weight, gradient and two moments, and writes all but the gradient.
_OPTIMIZER_PASSES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decoder of Qwen2's kind costs: weights of its matrix products outside the head, of the head, and
    of its adapters; the widths of its queries and keys over all layers; bytes of an element."""

    body: int
    head: int
    adapters: int
    query_width: int
    key_width: int
    element_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decoded token reads of weights, however many rows there are."""
        return (self.body + self.head) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt's tokens, and of 1, 2, ... tokens how many different beginnings of its completions go on: of
    all of them and of those with a gradient."""

    prompt: int
    decoded: Sequence[int]
    trained: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations, bytes moved and the least seconds that they take."""

    flops: float
    moved_bytes: float
    seconds: float

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            seconds=self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The best rates for one dtype and one size of weights."""

    flops_per_s: float
    bytes_per_s: float

    def phase(self, flops: float, moved_bytes: float) -> Work:
        """A phase takes as long as the slower of its two parts."""
        seconds = max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)
        return Work(flops=flops, moved_bytes=moved_bytes, seconds=seconds)


_NOTHING = Work(flops=0.0, moved_bytes=0.0, seconds=0.0)


def shape_of(config: Mapping[str, Any], *, dtype: str, lora_rank: int = 0) -> Shape:
    """The shape of a model from its config.json; the adapters are LoRA's of every linear layer."""
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, config["num_key_value_heads"] * width
    linear = [
        (hidden, queries),
        (hidden, keys),
        (hidden, keys),
        (queries, hidden),
        *[(hidden, inner)] * 2,
        (inner, hidden),
    ]
    return Shape(
        body=layers * sum(a * b for a, b in linear),
        head=config["vocab_size"] * hidden,
        adapters=layers * lora_rank * sum(a + b for a, b in linear),
        query_width=layers * queries,
        key_width=layers * keys,
        element_bytes=2 if dtype == "bfloat16" else 4,
    )


def machine_for(shape: Shape, rates: Rates, dtype: str) -> Machine:
    """The best rates at a model's dtype and size; of bfloat16 those of float32 where they are better, as they
    are on a processor that multiplies no bfloat16: whoever wants to can compute in float32."""
    fitting = [rates[name] for name in {dtype, "float32"}]
    size = "small" if shape.weight_bytes <= _CACHE_BYTES else "large"
    return Machine(
        flops_per_s=max(rate for own in fitting for rate in own["matmul"].values()),
        bytes_per_s=max(rate for own in fitting for rate in own[size].values()),
    )


def rollout(shape: Shape, groups: Sequence[Group], machine: Machine) -> Work:
    """Prefill once a group, then decode token by token with the rows that still run."""
    pairs = sum(_triangle(g.prompt) for g in groups)
    tokens = sum(g.prompt for g in groups)
    flops = 2.0 * shape.body * tokens + 2.0 * shape.head * len(groups) + 4.0 * shape.query_width * pairs
    total = machine.phase(flops, shape.weight_bytes + _cache_bytes(shape, tokens))
    for step in range(1, 1 + max(len(g.decoded) for g in groups)):
        total += _decode(shape, groups, step, machine)
    return total


def update(shape: Shape, groups: Sequence[Group], machine: Machine, optimizer: Machine) -> Work:
    """Forward and backward over what has a gradient, then AdamW."""
    kept = [g for g in groups if g.trained]
    tokens = sum(g.prompt + sum(g.trained) for g in kept)
    pairs = sum(
        _triangle(g.prompt) + sum(count * (g.prompt + n) for n, count in enumerate(g.trained, start=1))
        for g in kept
    )
    # The prompt's last token predicts, and each one behind it.
    predicted = sum(1 + sum(g.trained) for g in kept)
    is_lora = shape.adapters > 0
    # A frozen weight has no gradient of its own; it passes that of its input on.
    passes = 4.0 if is_lora else 6.0
    flops = (
        passes * (shape.body * tokens + shape.head * predicted)
        + 6.0 * shape.adapters * tokens
        + 12.0 * shape.query_width * pairs
    )
    num_stepped = shape.adapters if is_lora else shape.body + shape.head
    done = machine.phase(flops, 2 * shape.weight_bytes + 4 * num_stepped if kept else 0.0)
    return done + optimizer.phase(0.0, 4.0 * _OPTIMIZER_PASSES * num_stepped)


def _decode(shape: Shape, groups: Sequence[Group], step: int, machine: Machine) -> Work:
    running = [g for g in groups if len(g.decoded) >= step]
    rows = sum(g.decoded[step - 1] for g in running)
    seen = sum(g.decoded[step - 1] * (g.prompt + step) for g in running)
    held = sum(g.prompt + sum(g.decoded[:step]) for g in running)
    flops = 2.0 * (shape.body + shape.head) * rows + 4.0 * shape.query_width * seen
    return machine.phase(flops, shape.weight_bytes + _cache_bytes(shape, held))


def _cache_bytes(shape: Shape, tokens: int) -> float:
    return 2.0 * shape.key_width * tokens * shape.element_bytes


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _mean(works: Iterable[Work]) -> Work:
    found = list(works)
    total = sum(found, start=_NOTHING)
    count = len(found)
    return Work(
        flops=total.flops / count, moved_bytes=total.moved_bytes / count, seconds=total.seconds / count
    )


HEAD = (
    "| case | | GFLOP | GB moved | floor s | measured s | share of the floor |",
    "|---|---|---|---|---|---|---|",
)


def rows(case: Case, measured: Measured, model_dir: Path, rates: Rates) -> list[str]:
    """The floors of a case's rollout and update, and covey's share of them: floor over measured."""
    config = json.loads((model_dir / "config.json").read_text())
    shape = shape_of(config, dtype=case.dtype, lora_rank=16 if case.lora else 0)
    machine = machine_for(shape, rates, case.dtype)
    optimizer = machine_for(shape, rates, "float32")
    steps = [
        [Group(**{name: group[name] for name in ("prompt", "decoded", "trained")}) for group in groups]
        for result in measured.results
        for groups in result["lengths"][-case.steps :]
    ]
    floors = {
        "rollout": _mean(rollout(shape, groups, machine) for groups in steps),
        "update": _mean(update(shape, groups, machine, optimizer) for groups in steps),
    }
    return [
        f"| {case.name if phase == 'rollout' else ''} | {phase} | {floor.flops / 1e9:.3g} "
        f"| {floor.moved_bytes / 1e9:.3g} | {floor.seconds:.4f} | {seconds:.4f} "
        f"| {floor.seconds / seconds:.0%} |"
        for phase, floor in floors.items()
        for seconds in [statistics.median(getattr(run, f"{phase}_s") for run in measured.figures)]
    ]


def measured_rates(work: Path) -> Rates:
    """What the machine does at best, measured in a process of its own."""
    spec = work / "rates.json"
    spec.write_text("{}")
    rates: Rates = run_script("rates.py", spec, sys.executable)
    return rates


def rates_table(rates: Rates) -> list[str]:
    """What the machine does at best."""
    lines = [
        "| | matrix product 2048³ | weights | read by 8 rows | read by 64 rows | copy |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, own in rates.items():
        for label, says in (("small", "4 MB, in the cache"), ("large", "512 MB, in memory")):
            first = [dtype, f"{own['matmul']['2048'] / 1e9:,.0f} GFLOP/s"] if label == "small" else ["", ""]
            moved = [f"{own[label][name] / 1e9:.1f} GB/s" for name in ("linear 8", "linear 64", "copy")]
            lines.append(f"| {' | '.join([*first, says, *moved])} |")
    return lines
