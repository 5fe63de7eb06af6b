"""Part 5: tokens a second of an optimizer step, as a share of what the device multiplies, and profiles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from covey.algorithm.losses import LossOutput
from covey.kernels.choose import choose_kernels
from covey.learner.backends.single import SingleBackend
from covey.models.layouts import automatic
from covey.models.liger import use_liger, wants_liger
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.options.schema import LearnerOptions
from covey.plan.recompute import Recompute
from covey.token_streams import Row, StreamKind, random_rows
from covey.types import MicroBatch, TokenStats
from on_gpu.lines import Found, Lines
from on_gpu.machine import (
    QWEN_06B,
    QWEN_15B,
    TINY,
    Shape,
    compute_dtype,
    device,
    forget_peak,
    matmul_peak,
    peak_bytes,
    random_model,
    seconds_of,
    wait,
)
from on_gpu.offload import offload_lines
from on_gpu.sampling import recorded_engine, recordings, requests, sample

OPTIMIZER = LearnerOptions(learning_rate=1e-6)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows of `prompt` + `completion` tokens, as many as make each count of tokens."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    prompt: int
    completion: int


FULL = Plan(shapes=(QWEN_15B, QWEN_06B), tokens=(16384, 8192), prompt=512, completion=1536)
SMALL = Plan(shapes=(TINY,), tokens=(256, 64), prompt=16, completion=48)
# Tokens a second that were predicted for one H100, by model and tokens of a pass.
PREDICTED = {("1.5B", 16384): [27e3, 30e3]}
# Rows of a profile.
TOP = 20


def run(lines: Lines) -> None:
    """Write a line for every shape, count of tokens and stream; profiles go into a file of their own."""
    plan = SMALL if lines.small else FULL
    profiles = lines.path.with_name("profile.txt")
    measured: dict[str, float] = {}

    def limits() -> Found:
        measured["peak"] = matmul_peak(lines.small)
        return Found(figures={"product_tflops": measured["peak"] / 1e12})

    has_limits = lines.case("limits", limits)
    _replay(lines, plan.shapes[0], profiles)
    if has_limits:
        for shape in plan.shapes:
            _shape(lines, shape, plan, measured["peak"], profiles)
            gc.collect()
        offload_lines(lines, plan.shapes[-1], OPTIMIZER)


def _shape(lines: Lines, shape: Shape, plan: Plan, peak: float, profiles: Path) -> None:
    """Every count of tokens of one model, which may be too large for this GPU; then a profile."""
    forget_peak()
    made: list[SingleBackend] = []

    def weights() -> Found:
        policy = Policy(random_model(shape, torch.float32)).train()
        policy.attention = automatic(device())
        made.append(SingleBackend(policy, OPTIMIZER, compute_dtype=compute_dtype()))
        return Found(figures={"gb": peak_bytes() / 1e9, "attention": policy.attention})

    if not lines.case(f"{shape.name} weights", weights, needs_s=8):
        return
    for tokens in plan.tokens:
        for stream in _streams(tokens, plan):
            lines.case(
                f"{shape.name} {tokens} {stream}",
                lambda: _rate(made[0], shape, tokens, stream, plan, peak),  # noqa: B023 - called at once
                needs_s=10,
            )
    fewest, policy = min(plan.tokens), made[0].policy
    policy.kernels = choose_kernels("torch", device().type)
    lines.case(
        f"{shape.name} {fewest} packed, head by torch",
        lambda: _rate(made[0], shape, fewest, "packed", plan, peak),
        needs_s=5,
    )
    policy.kernels = choose_kernels("auto", device().type)
    if wants_liger("auto", policy.model, device()):
        use_liger(policy.model)
        for tokens in plan.tokens:
            lines.case(
                f"{shape.name} {tokens} packed, liger",
                lambda: _rate(made[0], shape, tokens, "packed", plan, peak),  # noqa: B023 - called at once
                needs_s=5,
            )
    lines.case(
        f"{shape.name} profile of a step", lambda: _profiled_step(made[0], shape, plan, profiles), needs_s=8
    )


def _streams(tokens: int, plan: Plan) -> tuple[StreamKind, ...]:
    return ("prefix", "packed") if tokens // (plan.prompt + plan.completion) > 1 else ("packed",)


def _rate(
    backend: SingleBackend, shape: Shape, tokens: int, stream: StreamKind, plan: Plan, peak: float
) -> Found:
    """Tokens of the rows a second, whatever the stream: a shared prompt counts as often as it is used."""
    backend.policy.use_stream(stream)
    micro = micro_of(_rows(shape, tokens // (plan.prompt + plan.completion), plan), stream, device())
    fitting = _first_that_fits(backend, micro)
    if fitting is None:
        return Found(figures={}, why="out of memory, with all activations computed again too")
    again, seconds = fitting
    predicted = PREDICTED.get((shape.name, tokens)) if stream == "packed" else None
    return Found(
        figures={
            "tokens_per_s": tokens / seconds,
            "share_of_product": _operations(shape, micro) / seconds / peak,
            "recompute": again,
            "gb": peak_bytes() / 1e9,
        },
        predicted={} if predicted is None else {"tokens_per_s": predicted},
    )


def _profiled_step(backend: SingleBackend, shape: Shape, plan: Plan, path: Path) -> Found:
    """The kernels of one step on the fewest tokens, with what that many tokens were computed again by."""
    tokens = min(plan.tokens)
    backend.policy.use_stream("packed")
    micro = micro_of(_rows(shape, tokens // (plan.prompt + plan.completion), plan), "packed", device())
    step = _step_of(backend, micro)
    step()
    return _profiled(f"{shape.name}: one update step of {tokens} tokens", step, path)


def _replay(lines: Lines, shape: Shape, path: Path) -> None:
    """The kernels of a rollout whose strides are played from recordings."""

    def work() -> Found:
        forget_peak()
        policy = Policy(random_model(shape, compute_dtype()), stream="prefix").eval()
        held = recordings()
        engine = recorded_engine(policy, held, max_rows=64)
        asked = requests([64] * 8, [17] * 8, shape.vocabulary)
        sample(engine, asked)
        found = _profiled(f"{shape.name}: a rollout of 64 x 17 tokens", lambda: sample(engine, asked), path)
        why = f"recordings failed: {held.failure}" if held.failure else ""
        return Found(figures=found.figures, passed=False if held.failure else None, why=why)

    lines.case(f"{shape.name} profile of a replay", work, needs_s=8)


def _profiled(title: str, work: Callable[[], object], path: Path) -> Found:
    """The kernels that took longest, into the file; on a CPU the operations."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as watched:
        work()
        wait()
    events: Any = [
        e for e in watched.key_averages() if (e.device_type == DeviceType.CUDA) == on_gpu and e.count
    ]
    spent = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) for e in events}
    counts = {e.key: e.count for e in events}
    total = sum(spent.values()) or 1.0
    longest = sorted(spent, key=lambda key: -spent[key])[:TOP]
    rows = [f"{spent[k] / 1e3:>10.3f} ms {spent[k] / total:>6.1%} {counts[k]:>7} x {k[:90]}" for k in longest]
    with path.open("a", encoding="utf-8") as file:
        file.write(
            "\n".join([f"{title}: {total / 1e3:.1f} ms in {sum(counts.values())} calls", *rows, "", ""])
        )
    figures = {
        "busy_ms": total / 1e3,
        "calls": sum(counts.values()),
        "longest": longest[0][:60] if rows else "",
    }
    return Found(figures=figures)


def _step_of(backend: SingleBackend, micro: MicroBatch) -> Callable[[], None]:
    def loss(stats: TokenStats, micro: MicroBatch) -> LossOutput:
        return LossOutput(loss=-stats.logprob_N.mean(), sums={})

    def step() -> None:
        backend.backward(micro, loss, last=True)
        backend.step(1e-6)

    return step


def _first_that_fits(backend: SingleBackend, micro: MicroBatch) -> tuple[Recompute, float] | None:
    """The least recomputation that fits into memory, and the seconds of a step."""

    step = _step_of(backend, micro)
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for kind in kinds:
        backend.policy.keep_activations(kind)
        forget_peak()
        try:
            return kind, seconds_of(step, 3)
        except torch.OutOfMemoryError:
            backend.policy.zero_grad(set_to_none=True)
            backend.masters.drop_low_gradients()
        gc.collect()
    return None


def _operations(shape: Shape, micro: MicroBatch) -> float:
    """Operations of a step: 6 a weight and token, and 12 a cell of attention that is seen."""
    lengths = [(s.length, 0 if s.parent is None else micro.segments[s.parent].length) for s in micro.segments]
    cells = sum(own * (own + 1) / 2 + own * before for own, before in lengths)
    attention = 12 * shape.layers * shape.heads * shape.width * cells
    stream, trained = len(micro.tokens_T), len(micro.target_N)
    return 6 * (shape.layer_weights * stream + shape.head_weights * trained) + attention


def _rows(shape: Shape, count: int, plan: Plan) -> list[Row]:
    return random_rows([(plan.prompt, [plan.completion] * count)], shape.vocabulary, seed=count)
