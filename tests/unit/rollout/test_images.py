"""Engines sample from prompts with images: the same tokens, and logprobs that are those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.token_streams import Row
from covey.types import Completion, EpisodeId, GenerationRequest, Medium, SamplingParams
from support.vision import FAMILIES, IMAGE, VIDEO, medium, own_logprobs, policy_of, row

CAT, DOG, WIDE = medium("cat", 2, 3), medium("dog", 2, 3), medium("wide", 1, 5)
PROMPTS: Sequence[Sequence[int | Medium]] = (
    [5, CAT, 6, WIDE, 7, 8],
    [9, DOG, 10],
    [9, CAT, 10],
    [11, 12, 13, 14],
    [5, *[6] * 70, WIDE, 7],
)
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=6, stop_token_ids=(1,))


def requests(policy: Any, num: int = 2) -> list[tuple[GenerationRequest, Row]]:
    sampling = replace(SAMPLING, banned_token_ids=policy.head.banned)
    found = []
    for number, parts in enumerate(PROMPTS):
        prompt = row(parts, [0])
        for sibling in range(num):
            episode = EpisodeId(
                seed=3, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling
            )
            ids = tuple(prompt.token_ids[:-1].tolist())
            request = GenerationRequest(
                turn=episode.turn_id(), prompt_token_ids=ids, sampling=sampling, media=prompt.media
            )
            found.append((request, replace(prompt, prompt_key=number)))
    return found


def sampled(engine: Engine, asked: Sequence[tuple[GenerationRequest, Row]]) -> list[Completion]:
    ids = [engine.submit(request) for request, _ in asked]
    done = {one.request_id: one for one in engine.results()}
    return [done[number] for number in ids]


def gap(policy: Any, asked: Sequence[tuple[GenerationRequest, Row]], done: Sequence[Completion]) -> float:
    """Return the largest distance of logprobs from the model's own."""
    worst = 0.0
    for (_, prompt), one in zip(asked, done, strict=True):
        whole = row([], [])
        ids = np.concatenate([prompt.token_ids[:-1], one.token_ids])
        trained = np.arange(len(ids)) >= len(prompt.token_ids) - 1
        whole = replace(prompt, token_ids=ids, is_trained=trained)
        with torch.no_grad():
            expected = own_logprobs(policy, whole)
        worst = max(worst, float((torch.from_numpy(one.logprobs.copy()) - expected).abs().max()))
    policy.use_stream("prefix")
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_draw_the_same_with_the_models_logprobs(family: str) -> None:
    policy = policy_of(family)
    asked = requests(policy)
    native = sampled(NativeEngine(policy), asked)
    strided = sampled(NativeEngine(policy, stride=3), asked)
    plain = sampled(GenerateEngine(policy), asked)
    assert gap(policy, asked, native) < 1e-5
    for other in (strided, plain):
        assert [one.token_ids.tolist() for one in other] == [one.token_ids.tolist() for one in native]
        assert gap(policy, asked, other) < 1e-5
    # Prompts that differ in the image alone are drawn from apart.
    assert native[2].logprobs.tolist() != native[4].logprobs.tolist()


def test_a_later_turn_goes_on_from_the_keys_of_its_images() -> None:
    """A further image may come with it."""
    policy = policy_of("qwen2_5_vl")
    ((first, prompt), *_) = requests(policy, 1)
    engine = NativeEngine(policy)
    (one,) = sampled(engine, [(replace(first, may_go_on=True), prompt)])
    before = [*first.prompt_token_ids, *one.token_ids.tolist()]
    for more in ([], [DOG]):
        behind = row([60, *more, 61], [])
        turn = replace(first.turn, turn=1)
        asked = replace(
            first,
            turn=turn,
            prompt_token_ids=(*before, *behind.token_ids.tolist()),
            media=(*first.media, *more),
            extends=first.turn,
        )
        whole = Row(
            token_ids=np.array([*asked.prompt_token_ids, 0], dtype=np.int32),
            is_trained=np.zeros(len(asked.prompt_token_ids) + 1, dtype=bool),
            prompt_length=len(asked.prompt_token_ids),
            prompt_key=0,
            media=asked.media,
        )
        engine = NativeEngine(policy)
        sampled(engine, [(replace(first, may_go_on=True), prompt)])
        computed = engine.num_computed
        (found,) = sampled(engine, [(asked, whole)])
        assert engine.num_computed - computed < len(asked.prompt_token_ids)
        assert gap(policy, [(asked, whole)], [found]) < 1e-5


def test_placeholders_are_never_sampled() -> None:
    """However probable they are."""
    policy = policy_of("qwen2_5_vl")
    assert set(policy.head.banned) >= {IMAGE, VIDEO}
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[[IMAGE, VIDEO]] *= 100.0
    for engine in (NativeEngine(policy), GenerateEngine(policy)):
        done = sampled(engine, requests(policy, 4))
        assert not {IMAGE, VIDEO} & {token for one in done for token in one.token_ids.tolist()}
