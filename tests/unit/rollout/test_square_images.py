"""Engines sample from prompts with images of Gemma 3 and SmolVLM2, whose towers take squares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.models.policy import Policy
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.token_streams import Row
from covey.types import EpisodeId, GenerationRequest, SamplingParams
from covey.types.arrays import ints
from support.engines import sampled
from support.squares import FAMILIES, TOKENS, medium, own_logprobs, policy_of, row, squares_seen


def prompts(family: str) -> list[Row]:
    """Return a prompt of two images of other numbers of squares, two that differ in one alone, and text."""
    wide = medium(family, "wide", 1, 2) if family == "smolvlm" else medium(family, "wide")
    cat, dog = medium(family, "cat"), medium(family, "dog")
    parts: list[list[Any]] = [[5, cat, 6, wide, 7, 8], [9, dog, 10], [9, cat, 10], [11, 12, 13]]
    return [row(own, [0], str(number)) for number, own in enumerate(parts)]


def requests(policy: Policy, asked: list[Row]) -> list[GenerationRequest]:
    """Return a request for two completions of each prompt."""
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=6, stop_token_ids=(1,), banned_token_ids=policy.head.banned
    )
    return [
        GenerationRequest(
            turn=EpisodeId(
                seed=3, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling
            ).turn_id(),
            prompt_token_ids=tuple(prompt.token_ids[:-1].tolist()),
            sampling=sampling,
            media=prompt.media,
        )
        for number, prompt in enumerate(asked)
        for sibling in range(2)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_draw_with_the_models_logprobs(family: str) -> None:
    policy, asked = policy_of(family), prompts(family)
    engines: list[Engine] = [GenerateEngine(policy)]
    if family == "smolvlm":
        engines += [NativeEngine(policy), NativeEngine(policy, stride=3)]
    drawn = []
    for engine in engines:
        policy.use_stream("prefix" if isinstance(engine, NativeEngine) else "padded")
        done = sampled(engine, requests(policy, asked))
        drawn.append([one.token_ids for one in done])
        for number, one in enumerate(done):
            prompt = asked[number // 2]
            start = len(prompt.token_ids) - 1
            ids = np.concatenate([prompt.token_ids[:-1], ints(one.token_ids)])
            whole = replace(prompt, token_ids=ids, is_trained=np.arange(len(ids)) >= start)
            with torch.no_grad():
                expected = own_logprobs(policy, whole)
            assert float((torch.tensor(one.logprobs) - expected).abs().max()) < 1e-5
        assert done[2].logprobs != done[4].logprobs, "the image matters"
    assert drawn == drawn[:1] * len(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_runs_once_for_an_image(family: str) -> None:
    """However many prompts and completions hold it."""
    policy = policy_of(family)
    cat, dog = medium(family, "cat"), medium(family, "dog")
    parts: list[list[Any]] = [[9, cat, 10], [9, dog, 10], [8, cat, 10]]
    asked = requests(policy, [row(own, [0], str(number)) for number, own in enumerate(parts)])
    seen = squares_seen(policy)
    sampled(GenerateEngine(policy), asked)
    if family == "smolvlm":
        policy.use_stream("prefix")
        sampled(NativeEngine(policy), asked)
    assert seen == [(cat.num_tokens + dog.num_tokens) // TOKENS] * (1 + (family == "smolvlm"))
