"""Part 3: tokens a second of an optimizer step, as a share of what the device multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.algorithm.losses import LossOutput
from covey.learner.backends.single import SingleBackend
from covey.learner.optimizer import OptimizerConfig
from covey.models.layouts import AttentionKind, automatic
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.models.stream import Row
from covey.plan.recompute import Recompute
from covey.types import MicroBatch, TokenStats
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
    say,
    seconds_of,
)

OPTIMIZER = OptimizerConfig(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows of `prompt` + `completion` tokens, as many as make each count of tokens."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    prompt: int
    completion: int


FULL = Plan(shapes=(QWEN_06B, QWEN_15B), tokens=(2048, 8192, 16384), prompt=512, completion=1536)
SMALL = Plan(shapes=(TINY,), tokens=(64, 256), prompt=16, completion=48)


def training(small: bool) -> None:
    """Print a line for every shape, count of tokens and kind of attention."""
    plan = SMALL if small else FULL
    peak = matmul_peak(small)
    rows = f"rows of {plan.prompt} + {plan.completion} tokens"
    say(f"training: forward, backward and AdamW with float32 weights, computed in {compute_dtype()}; {rows}")
    say(f"measured matmul peak {peak / 1e12:.1f} TFLOP/s; operations of recomputation are not counted")
    say(
        f"{'model':<6} {'tokens':>6} {'attention':<10} {'stream':<7} {'again':<9} "
        f"{'tokens/s':>10} {'of peak':>8} {'GB':>6}"
    )
    best = automatic(device())
    kinds: tuple[AttentionKind, ...] = ("sdpa",) if best == "sdpa" else ("sdpa", best)
    for shape in plan.shapes:
        forget_peak()
        policy = Policy(random_model(shape, torch.float32)).train()
        backend = SingleBackend(policy, OPTIMIZER, compute_dtype=compute_dtype())
        for tokens in plan.tokens:
            for kind in kinds:
                _line(shape, backend, tokens, kind, plan, peak)
        del backend, policy


def _line(
    shape: Shape, backend: SingleBackend, tokens: int, kind: AttentionKind, plan: Plan, peak: float
) -> None:
    count = tokens // (plan.prompt + plan.completion)
    for stream in ("packed", "prefix") if count > 1 else ("packed",):
        backend.policy.attention = kind
        backend.policy.use_stream(stream)  # type: ignore[arg-type]
        rows = _rows(shape, count, plan)
        micro = micro_of(rows, stream, device())  # type: ignore[arg-type]
        found = _first_that_fits(backend, micro)
        head = f"{shape.name:<6} {tokens:>6} {kind:<10} {stream:<7}"
        if found is None:
            say(f"{head} out of memory, with all activations computed again too")
            continue
        again, seconds = found
        # Tokens of the rows, whatever the stream: a shared prompt counts as often as it is used.
        rate = f"{tokens / seconds:>10,.0f}"
        share = f"{_operations(shape, micro) / seconds / peak:>8.1%}"
        say(f"{head} {again:<9} {rate} {share} {peak_bytes() / 1e9:>6.1f}")


def _first_that_fits(backend: SingleBackend, micro: MicroBatch) -> tuple[Recompute, float] | None:
    """The least recomputation that fits into memory, and the seconds of a step."""

    def loss(stats: TokenStats, micro: MicroBatch) -> LossOutput:
        return LossOutput(loss=-stats.logprob_N.mean(), sums={})

    def step() -> None:
        backend.backward(micro, loss, last=True)
        backend.step(1e-6)

    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for kind in kinds:
        backend.policy.keep_activations(kind)
        forget_peak()
        try:
            return kind, seconds_of(step, 3)
        except torch.OutOfMemoryError:
            backend.policy.zero_grad(set_to_none=True)
            backend.masters.drop_low_gradients()
    return None


def _operations(shape: Shape, micro: MicroBatch) -> float:
    """Operations of a step: 6 a weight and token, and 12 a cell of attention that is seen."""
    lengths = [(s.length, 0 if s.parent is None else micro.segments[s.parent].length) for s in micro.segments]
    cells = sum(own * (own + 1) / 2 + own * before for own, before in lengths)
    attention = 12 * shape.layers * shape.heads * shape.width * cells
    stream, trained = len(micro.tokens_T), len(micro.target_N)
    return 6 * (shape.layer_weights * stream + shape.head_weights * trained) + attention


def _rows(shape: Shape, count: int, plan: Plan) -> list[Row]:
    generator = torch.Generator().manual_seed(count)
    shared = torch.randint(shape.vocabulary, (plan.prompt,), generator=generator).tolist()
    trained = [False] * plan.prompt + [True] * plan.completion
    return [
        Row(
            token_ids=shared
            + torch.randint(shape.vocabulary, (plan.completion,), generator=generator).tolist(),
            is_trained=trained,
            prompt_length=plan.prompt,
            prompt_key=0,
        )
        for _ in range(count)
    ]
