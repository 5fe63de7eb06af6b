"""Tokens that generation_config.json bans: no engine draws them, and they have no part in any probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.rollout.canary import canary_requests
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.sampling_wire import ANY_BANS, sampling_of
from covey.rollout.server.values import WireError
from covey.types import Completion, GenerationRequest, SamplingParams
from support.filters import kept_slowly


def sampled(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """In the order of the requests."""
    numbers = [engine.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in engine.results()}
    return [done[number] for number in numbers]


FILTERS = ({}, {"top_p": 0.9}, {"top_k": 6}, {"top_p": 0.8, "top_k": 20, "min_p": 0.01})


@pytest.fixture
def banning(quickstart_policy, monkeypatch, requests_of, random_prompts):
    """The policy without the tokens that it samples most, its requests, and what it samples with them."""
    requests = requests_of(random_prompts(9, 3, 14), 8, max_new_tokens=12, temperature=0.9)
    requests = [replace(r, sampling=replace(r.sampling, **FILTERS[n % 4])) for n, r in enumerate(requests)]
    free = sampled(NativeEngine(quickstart_policy, max_rows=16), requests)
    tokens, counts = np.unique(np.concatenate([c.token_ids for c in free]), return_counts=True)
    banned = tuple(sorted(tokens[counts.argsort()[-8:]].tolist()))
    monkeypatch.setattr(quickstart_policy, "head", replace(quickstart_policy.head, banned=banned))
    own = [replace(r, sampling=replace(r.sampling, banned_token_ids=banned)) for r in requests]
    return quickstart_policy, own, banned


def logits_of(policy, request, completion) -> np.ndarray:
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids.tolist()]])
    stream = policy.stream
    policy.use_stream("padded")
    with torch.no_grad():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0]
    policy.use_stream(stream)
    own = logits[len(request.prompt_token_ids) - 1 : -1].double() / request.sampling.temperature
    return own.index_fill(1, torch.tensor(request.sampling.banned_token_ids), -torch.inf).numpy()


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_they_are_never_drawn(engine, banning):
    policy, requests, banned = banning
    done = sampled(engine(policy, max_rows=16), requests)
    num = 0
    for request, completion in zip(requests, done, strict=True):
        own, sets = request.sampling, completion.kept or [None] * len(completion.token_ids)
        assert not {*banned} & {*completion.token_ids.tolist()}
        for logit_V, token, logprob, kept in zip(
            logits_of(policy, request, completion),
            completion.token_ids,
            completion.logprobs,
            sets,
            strict=True,
        ):
            ids = slice(None) if kept is None else kept.tolist()
            if kept is not None:
                differing = {*kept.tolist()} ^ {*kept_slowly(logit_V, own.top_p, own.top_k, own.min_p)}
                assert not {*banned} & {*kept.tolist()} and len(differing) <= 1
            due = logit_V[token] - np.logaddexp.reduce(logit_V[ids])
            assert logprob == pytest.approx(due, abs=1e-4)
            num += 1
    assert num > 150


def test_both_engines_draw_the_same(banning):
    policy, requests, _ = banning
    one, other = (sampled(e(policy, max_rows=16), requests) for e in (NativeEngine, GenerateEngine))
    assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in other]


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_a_request_with_other_bans_is_refused(engine, banning):
    policy, requests, banned = banning
    other = replace(requests[0].sampling, banned_token_ids=banned[1:])
    with pytest.raises(ValueError, match="bans"):
        engine(policy, max_rows=16).submit(replace(requests[0], sampling=other))


def test_a_canary_asks_with_them(banning):
    policy, _, banned = banning
    requests = canary_requests(policy.vocab, policy.head.banned)
    assert {r.sampling.banned_token_ids for r in requests} == {banned}
    assert not {*banned} & {t for c in sampled(NativeEngine(policy), requests) for t in c.token_ids.tolist()}


def body(**changes):
    own = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=(2,))
    given = {name: getattr(own, name) for name in own.__slots__}
    return {**given, "stop_token_ids": [2], "stop_strings": [], "banned_token_ids": [3, 7], **changes}


@pytest.mark.parametrize("bans", [ANY_BANS, "3 7"])
def test_a_server_reads_them(bans):
    read = sampling_of(body(), 10, "native", has_tokenizer=True, bans=bans)
    assert read.banned_token_ids == (3, 7)


@pytest.mark.parametrize("bans, ids", [("", [3, 7]), ("3", [3, 7]), ("3 7", []), (ANY_BANS, [10])])
def test_a_server_refuses_what_its_model_does_not_ban(bans, ids):
    with pytest.raises(WireError):
        sampling_of(body(banned_token_ids=ids), 10, "native", has_tokenizer=True, bans=bans)
