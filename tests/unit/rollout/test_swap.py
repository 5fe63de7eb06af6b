"""Weights that change while rows run: what is sampled behind the swap is of the new weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from covey.kernels import choose
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.rollout.native import refill
from covey.rollout.native.decoding import Decoding
from covey.rollout.native.engine import NativeEngine
from covey.token_streams import Row
from covey.types import GenerationRequest, Medium, SamplingParams, TurnId
from covey.types.arrays import bools, ints
from support import squares, vision
from support.engines import Plain, plain
from support.needs import need

CLOSE = 1e-5


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        need("a C compiler")
    else:
        monkeypatch.setattr(choose, "open_library", lambda: None)
    return str(request.param)


def requests(
    policy: Policy, prompts: Sequence[tuple[Sequence[int], tuple[Medium, ...]]], siblings: int = 3
) -> list[GenerationRequest]:
    """Return requests whose completions have other lengths, the first of them short."""
    return [
        GenerationRequest(
            turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=1.0,
                max_new_tokens=4 if number == sibling == 0 else 18 + 3 * sibling,
                stop_token_ids=(),
                banned_token_ids=policy.head.banned,
            ),
            media=media,
        )
        for number, (prompt, media) in enumerate(prompts)
        for sibling in range(siblings)
    ]


def swapped(policy: Policy, asked: Sequence[GenerationRequest], stride: int, rows: int) -> list[Plain]:
    """Sample, with other weights from the end of the first completion on."""
    engine = NativeEngine(policy, stride=stride, max_rows=rows)
    numbers = [engine.submit(request) for request in asked]
    found: dict[int, Plain] = {}
    for completion in engine.results():
        if not found:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(
                        0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                    )
            engine.publish(iter(()), 4)
        found[completion.request_id] = plain(completion)
    return [found[number] for number in numbers]


def gap(policy: Policy, asked: Sequence[GenerationRequest], found: Sequence[Plain]) -> tuple[float, int]:
    """Return the largest |logprob - that of the new weights| of tokens behind the swap, and how many rows
    have tokens on both sides."""
    worst, both = 0.0, 0
    for request, one in zip(asked, found, strict=True):
        old = one.versions.count(0)
        both += 0 < old < len(one.versions)
        prompt = len(request.prompt_token_ids)
        ids = ints([*request.prompt_token_ids, *one.token_ids])
        trained = bools([False] * prompt + [True] * len(one.token_ids))
        row = Row(token_ids=ids, is_trained=trained, prompt_length=prompt, prompt_key=0, media=request.media)
        policy.use_stream("prefix")
        with torch.no_grad():
            expected = policy(micro_of([row], "packed", policy.device)).logprob_N
        gaps = (torch.tensor(one.logprobs) - expected).abs()[old:]
        worst = max(worst, float(gaps.max()) if len(gaps) else 0.0)
    return worst, both


def of_text(lengths: Sequence[int]) -> list[tuple[list[int], tuple[Medium, ...]]]:
    return [([3 + (7 * i + length) % 80 for i in range(length)], ()) for length in lengths]


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("lengths", [(9, 12), (70, 80)], ids=["flat", "shared"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_logprobs_behind_a_swap_are_those_of_the_new_weights(
    family: str, lengths: Sequence[int], stride: int, tiny_policy: Callable[[str], Policy]
) -> None:
    """Of rows that run, of siblings that wait, and of prompts that wait."""
    policy = tiny_policy(family)
    policy.use_stream("prefix")
    asked = requests(policy, of_text((*lengths, lengths[0] + 1)))
    found = swapped(policy, asked, stride, rows=5)
    worst, both = gap(policy, asked, found)
    assert both >= 3 and worst < CLOSE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_images_are_seen_by_the_new_weights(family: str) -> None:
    support = vision if family in vision.FAMILIES else squares
    policy = support.policy_of(family)
    policy.use_stream("prefix")
    image = vision.medium("cat", 2, 3) if support is vision else squares.medium(family, "cat", 1, 2)
    prompts = [support.row([5, image, 6, number], [0], "a") for number in (7, 8)]
    asked = requests(policy, [(p.token_ids[:-1].tolist(), p.media) for p in prompts])
    found = swapped(policy, asked, 1, rows=4)
    worst, both = gap(policy, asked, found)
    assert both >= 3 and worst < CLOSE


def test_prompts_that_no_pass_holds_together_are_computed_apart(
    tiny_policy: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refill, "_MOST_TOKENS", 20)
    policy = tiny_policy("llama")
    policy.use_stream("prefix")
    asked = requests(policy, of_text((9, 30)))
    worst, both = gap(policy, asked, swapped(policy, asked, 1, rows=6))
    assert both == 5 and worst < CLOSE


def test_a_cache_that_is_kept_is_seen(
    tiny_policy: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is not blind: with keys and values of the former weights it fails."""
    monkeypatch.setattr(Decoding, "refill", lambda self, families: None)
    policy = tiny_policy("llama")
    policy.use_stream("prefix")
    asked = requests(policy, of_text((9, 12)))
    worst, both = gap(policy, asked, swapped(policy, asked, 1, rows=6))
    assert both == 5 and worst > 0.01
