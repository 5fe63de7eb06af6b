"""Part 4: tokens a second of the native engine, beside what the memory's bandwidth allows."""

from __future__ import annotations

import gc
import random
import statistics
from dataclasses import dataclass

import torch

from covey.models.policy import Policy
from on_gpu.lines import Found, Lines
from on_gpu.machine import (
    QWEN_05B,
    QWEN_7B,
    QWEN_15B,
    TINY,
    Shape,
    compute_dtype,
    copy_bandwidth,
    forget_peak,
    peak_bytes,
    random_model,
)
from on_gpu.sampling import Graphs, recorded_engine, recordings, requests, sample

SIBLINGS = 8
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decoded: the two lengths whose difference is timed, so that prefill cancels out; then
    completions of other lengths up to `ragged`, by the first of the `shapes` that is no larger than 1.5B."""

    shapes: tuple[Shape, ...]
    batches: tuple[int, ...]
    prompt: int
    short: int
    long: int
    ragged: int


FULL = Plan(
    shapes=(QWEN_7B, QWEN_15B, QWEN_05B), batches=(64, 8, 256), prompt=256, short=16, long=80, ragged=1000
)
SMALL = Plan(shapes=(TINY,), batches=(8, 16), prompt=16, short=4, long=20, ragged=40)
# Tokens a second that were predicted for one H100, by model and batch.
PREDICTED = {
    ("0.5B", 8): 3e3,
    ("0.5B", 64): 20e3,
    ("0.5B", 256): 52e3,
    ("1.5B", 8): 1.5e3,
    ("1.5B", 64): 11e3,
    ("1.5B", 256): 32e3,
    ("7B", 8): 0.8e3,
    ("7B", 64): 5.8e3,
    ("7B", 256): 17e3,
}


def run(lines: Lines) -> None:
    """Write a line for every shape and batch, and one for completions of ragged lengths."""
    plan = SMALL if lines.small else FULL
    measured: dict[str, float] = {}

    def limits() -> Found:
        measured["bandwidth"] = copy_bandwidth(lines.small)
        return Found(figures={"copy_tb_per_s": measured["bandwidth"] / 1e12})

    if lines.case("limits", limits):
        for shape in plan.shapes:
            _shape(lines, shape, plan, measured["bandwidth"])
            gc.collect()


def _shape(lines: Lines, shape: Shape, plan: Plan, bandwidth: float) -> None:
    """Every batch of one model, which may be too large for this GPU."""
    forget_peak()
    made: list[Policy] = []

    def weights() -> Found:
        made.append(Policy(random_model(shape, compute_dtype()), stream="prefix").eval())
        return Found(figures={"gb": peak_bytes() / 1e9})

    if not lines.case(f"{shape.name} weights", weights, needs_s=8):
        return
    for batch in plan.batches:
        lines.case(
            f"{shape.name} batch {batch}",
            lambda: _rate(made[0], shape, batch, plan, bandwidth),  # noqa: B023 - called at once
            needs_s=8,
        )
        gc.collect()
    if shape == plan.shapes[-1]:
        lines.case(f"{shape.name}, new prompt lengths", lambda: _new_lengths(made[0], shape), needs_s=8)
    if shape in (QWEN_15B, TINY):
        lines.case(
            f"{shape.name}, 64 rows up to {plan.ragged}", lambda: _ragged(made[0], shape, plan), needs_s=25
        )


def _rate(policy: Policy, shape: Shape, batch: int, plan: Plan, bandwidth: float) -> Found:
    """A decoding step of a batch, from medians of rollouts of two lengths."""
    forget_peak()
    held = recordings()
    engine = recorded_engine(policy, held, max_rows=batch)
    asked = {
        length: requests([plan.prompt] * (batch // SIBLINGS), [length] * SIBLINGS, shape.vocabulary, batch)
        for length in (plan.long, plan.short)
    }
    # The cache is made for the longest first, and every size is recorded.
    with Graphs() as graphs:
        for length in asked:
            sample(engine, asked[length])
    times: dict[int, list[float]] = {length: [] for length in asked}
    for _ in range(REPEATS):
        for length in asked:
            times[length].append(sample(engine, asked[length])[1])
    short_s, long_s = (statistics.median(times[n]) for n in (plan.short, plan.long))
    figures: dict[str, float] = {"graphs": graphs.count, "gb": peak_bytes() / 1e9}
    if held.failure:
        return Found(figures=figures, passed=False, why=f"recordings failed: {held.failure}")
    if long_s <= short_s:
        why = f"{plan.long} tokens took no longer than {plan.short}: {long_s:.4f} and {short_s:.4f} s"
        return Found(figures=figures, why=why)
    step_s = (long_s - short_s) / (plan.long - plan.short)
    floor_s = _step_bytes(shape, batch, plan) / bandwidth
    rate = {"tokens_per_s": batch / step_s, "ms_a_step": step_s * 1e3, "floor_ms": floor_s * 1e3}
    predicted = PREDICTED.get((shape.name, batch))
    return Found(
        figures={**rate, "share_of_floor": floor_s / step_s, **figures},
        predicted={} if predicted is None else {"tokens_per_s": predicted},
    )


def _new_lengths(policy: Policy, shape: Shape) -> Found:
    """Prompts of a length that occurs for the first time: a kernel that is made for each shows itself."""
    engine = recorded_engine(policy, recordings(), max_rows=8)
    times = [sample(engine, requests([257 + n], [1] * SIBLINGS, shape.vocabulary, n))[1] for n in range(9)]
    # The first one makes the cache, and records.
    return Found(figures={"ms_a_length": 1e3 * statistics.median(times[1:])})


def _ragged(policy: Policy, shape: Shape, plan: Plan) -> Found:
    """Two rollouts of 64 completions of other lengths: the first one records, the second one records less."""
    forget_peak()
    held = recordings()
    engine = recorded_engine(policy, held, max_rows=64)
    figures: dict[str, float] = {}
    for number, name in enumerate(("first", "second")):
        chance = random.Random(number)
        lengths = [min(plan.ragged, 1 + int(chance.expovariate(2.5 / plan.ragged))) for _ in range(64)]
        lengths[0] = plan.ragged
        asked = [
            request
            for i in range(0, 64, SIBLINGS)
            for request in requests(
                [plan.prompt], lengths[i : i + SIBLINGS], shape.vocabulary, 64 * number + i
            )
        ]
        with Graphs() as graphs:
            made, seconds = sample(engine, asked)
        figures |= {
            f"{name}_s": seconds,
            f"{name}_tokens_per_s": sum(len(c.token_ids) for c in made) / seconds,
            f"{name}_graphs": graphs.count,
            f"{name}_capture_s": graphs.seconds,
        }
    if torch.cuda.is_available():
        figures |= {"reserved_gb": torch.cuda.memory_reserved() / 1e9, "peak_gb": peak_bytes() / 1e9}
    if held.failure:
        return Found(figures=figures, passed=False, why=f"recordings failed: {held.failure}")
    return Found(figures=figures, predicted={"first_capture_s": [15, 25]} if shape == QWEN_15B else {})


def _step_bytes(shape: Shape, batch: int, plan: Plan) -> float:
    """Bytes that one step has to read: every weight, each prompt once, each row's own tokens."""
    size = torch.finfo(compute_dtype()).bits // 8
    tokens = batch // SIBLINGS * plan.prompt + batch * (plan.short + plan.long) / 2
    return size * (shape.layer_weights + shape.head_weights) + shape.kv_bytes(size) * tokens
