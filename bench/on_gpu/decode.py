"""Part 2: tokens a second of the native engine, beside what the memory's bandwidth allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, NoiseKey, SamplingParams
from on_gpu.machine import (
    QWEN_05B,
    QWEN_7B,
    QWEN_15B,
    TINY,
    Shape,
    compute_dtype,
    copy_bandwidth,
    device,
    forget_peak,
    peak_bytes,
    random_model,
    say,
    wait,
)

SIBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decoded: the two lengths whose difference is timed, so that prefill cancels out."""

    shapes: tuple[Shape, ...]
    batches: tuple[int, ...]
    prompt: int
    short: int
    long: int


FULL = Plan(shapes=(QWEN_05B, QWEN_15B, QWEN_7B), batches=(8, 64, 256), prompt=256, short=16, long=80)
SMALL = Plan(shapes=(TINY,), batches=(8, 16), prompt=16, short=4, long=20)


def decode(small: bool) -> None:
    """Print a line for every shape and batch."""
    plan = SMALL if small else FULL
    bandwidth = copy_bandwidth(small)
    say(f"decoding: native engine, {compute_dtype()}, prompts of {plan.prompt} tokens shared by {SIBLINGS}")
    say(
        f"measured copy bandwidth {bandwidth / 1e12:.2f} TB/s; floor = weights + keys and values, once a step"
    )
    say(
        f"{'model':<6} {'batch':>5} {'tokens/s':>10} {'ms/step':>8} {'floor ms':>8} {'of floor':>8} {'GB':>6}"
    )
    for shape in plan.shapes:
        forget_peak()
        policy = Policy(random_model(shape, compute_dtype()), stream="prefix").eval()
        for batch in plan.batches:
            step_s = _step_seconds(policy, shape, batch, plan)
            floor_s = _step_bytes(shape, batch, plan) / bandwidth
            say(
                f"{shape.name:<6} {batch:>5} {batch / step_s:>10,.0f} {step_s * 1e3:>8.2f} "
                f"{floor_s * 1e3:>8.2f} {floor_s / step_s:>8.0%} {peak_bytes() / 1e9:>6.1f}"
            )
        del policy


def _step_bytes(shape: Shape, batch: int, plan: Plan) -> float:
    """Bytes that one step has to read: every weight, each prompt once, each row's own tokens."""
    size = torch.finfo(compute_dtype()).bits // 8
    tokens = batch // SIBLINGS * plan.prompt + batch * (plan.short + plan.long) / 2
    return size * (shape.layer_weights + shape.head_weights) + shape.kv_bytes(size) * tokens


def _step_seconds(policy: Policy, shape: Shape, batch: int, plan: Plan) -> float:
    engine = NativeEngine(policy, max_rows=batch)
    # The cache is made for the longest first, and kernels are chosen.
    _run(engine, shape, batch, plan, plan.long)
    short_s, long_s = (_run(engine, shape, batch, plan, n) for n in (plan.short, plan.long))
    return (long_s - short_s) / (plan.long - plan.short)


def _run(engine: NativeEngine, shape: Shape, batch: int, plan: Plan, length: int) -> float:
    generator = torch.Generator().manual_seed(batch)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=length, stop_token_ids=())
    for group in range(batch // SIBLINGS):
        prompt = torch.randint(shape.vocabulary, (plan.prompt,), generator=generator).tolist()
        for sibling in range(SIBLINGS):
            key = NoiseKey(seed=0, split="train", rollout=0, attempt=0, prompt_id=group, sibling=sibling)
            engine.submit(GenerationRequest(prompt_token_ids=tuple(prompt), sampling=sampling, noise_key=key))
    wait()
    begin = time.perf_counter()
    done = list(engine.results())
    wait()
    seconds = time.perf_counter() - begin
    assert len(done) == batch and all(len(c.token_ids) == length for c in done), device()
    return seconds
