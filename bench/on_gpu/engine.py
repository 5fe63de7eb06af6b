"""Part 1: the engine with recordings against plain steps and transformers' `generate`; then the self test."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from covey.models.policy import Policy
from covey.rollout.generate import GenerateEngine
from covey.selftest.bounds import BOUNDS
from covey.selftest.checks import Measured, checks
from covey.selftest.subject import subject, write_random_model
from covey.types import Completion
from on_gpu.gradients import VOCABULARY, random_family
from on_gpu.lines import Found, Lines
from on_gpu.machine import device
from on_gpu.sampling import (
    Graphs,
    plain_engine,
    recorded_engine,
    recordings,
    requests,
    sample,
    used_bytes,
)

# Tokens of prompts: the engine copies short ones to every row, and lets siblings share long ones.
PROMPTS = {"flat": (5, 12, 30, 17), "prefix": (70, 123, 96, 150)}
LENGTHS = (40, 20, 9, 1)
# In float32 the tokens are the same and logprobs differ by the order of sums. In bfloat16 a token near the
# border of two may be drawn differently, and what follows it is not comparable; but most rows agree.
MAX_FLOAT32 = BOUNDS["sampler, float32: largest difference"].other
MEAN_BFLOAT16 = BOUNDS["sampler, bfloat16: mean difference"].other
SHARE_BFLOAT16 = 0.3


def run(lines: Lines) -> None:
    """Write a line for every family, dtype and kind of cache, then one for each check of the self test."""
    # Float32 on a GPU means float32: tensor cores would round to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    _family(lines, "qwen3")
    self_test(lines)
    _family(lines, "gemma2")


def _family(lines: Lines, family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = random_family(family)
        for parameter in model.parameters():
            # The frequencies of positions stay in float32, as in a run.
            parameter.data = parameter.data.to(dtype)
        policy = Policy(model, stream="prefix").eval()
        for kind in PROMPTS:
            name = f"{family} {str(dtype).removeprefix('torch.')} {kind}"
            lines.case(
                name,
                lambda p=policy, k=kind: _compared(p, k, small=lines.small),  # type: ignore[misc]
                needs_s=4,
            )


def _compared(policy: Policy, kind: str, *, small: bool) -> Found:
    """Two rollouts of other lengths through one engine with recordings, each against both others."""
    held = recordings()
    engine, plain = recorded_engine(policy, held), plain_engine(policy)
    exact = next(policy.parameters()).dtype == torch.float32
    passed, figures, count, capture_s, taken = True, {}, 0, 0.0, 0
    for number, lengths in enumerate((LENGTHS[1:] if small else LENGTHS, LENGTHS[2:])):
        asked = requests(PROMPTS[kind][: 2 if small else None], lengths, VOCABULARY, seed=number)
        steps, _ = sample(plain, asked)
        before = used_bytes()
        with Graphs() as graphs:
            played, _ = sample(engine, asked)
        taken += used_bytes() - before
        count, capture_s = count + graphs.count, capture_s + graphs.seconds
        generated, _ = sample(GenerateEngine(policy), asked)
        for other, against in (("plain", steps), ("generate", generated)):
            share, largest, mean = agreement(played, against)
            figures |= {f"same_as_{other}": min(share, figures.get(f"same_as_{other}", 1.0))}
            figures |= {f"gap_to_{other}": max(largest, figures.get(f"gap_to_{other}", 0.0))}
            within = share == 1.0 and largest <= MAX_FLOAT32 if exact else mean <= MEAN_BFLOAT16
            passed = passed and within and share >= SHARE_BFLOAT16
    figures |= {"graphs": count}
    if count:
        figures |= {"seconds_a_graph": capture_s / count, "mib_a_graph": taken / count / 2**20}
    elif device().type == "cuda" and not held.failure:
        return Found(figures=figures, passed=False, why="no CUDA graph was captured")
    why = f"recordings failed: {held.failure}" if held.failure else ""
    predicted = {"seconds_a_graph": [0.4, 0.6]} if count else {}
    return Found(figures=figures, passed=passed and not held.failure, why=why, predicted=predicted)


def agreement(got: Sequence[Completion], other: Sequence[Completion]) -> tuple[float, float, float]:
    """The share of tokens before rows part, and of these tokens the largest and the mean gap of logprobs."""
    gaps: list[float] = []
    for mine, its in zip(got, other, strict=True):
        for a, b, x, y in zip(mine.token_ids, its.token_ids, mine.logprobs, its.logprobs, strict=True):
            if a != b:
                break
            gaps.append(abs(float(x) - float(y)))
    total = sum(len(c.token_ids) for c in got)
    if not gaps or any(gap != gap for gap in gaps):
        return 0.0, float("inf"), float("inf")
    return len(gaps) / total, max(gaps), sum(gaps) / len(gaps)


def self_test(lines: Lines) -> None:
    """covey's self test on this device, a line a check; attention by masked rows, which compiles nothing."""

    def work() -> Found:
        count = 0
        for row in checks(tested):
            lines.case(f"self test: {row.name}", lambda row=row: _measured(row))  # type: ignore[misc]
            count += 1
            if not lines.small and lines.left_s < 1:
                return Found(figures={"checks": count}, why="no time was left for the others")
        return Found(figures={"checks": count}, passed=count > 0)

    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory))
        tested = replace(subject(device(), Path(directory), is_built_in=True), attention="sdpa")
        lines.case("self test", work, needs_s=3)


def _measured(row: Measured) -> Found:
    return Found(figures={"measured": row.value, "limit": row.limit}, passed=not row.failed, why=row.unused)
