"""What filters kept, between a run and a rollout server: sent, read and refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.errors import EngineLost
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.server.held import HeldEngine
from covey.rollout.server.sampling_wire import kept_body, kept_bytes, kept_of
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import request_body, requests_of
from covey.types import Completion, GenerationRequest, KeptSets, SamplingParams, TurnId
from support.servers import engine_on, policy_of_server, running, status_of

VOCAB = 320
FILTERED = SamplingParams(temperature=1.0, max_new_tokens=6, stop_token_ids=(), top_p=0.9, top_k=50)
# A list, a list as long as a bitmap, and bitmaps.
SETS = [[5], range(10), range(10, 30, 2), range(11), range(VOCAB), [*range(0, 320, 9)]]
TOKENS = [5, 9, 10, 0, 319, 315]


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """A server's model and the learner's."""
    return [policy_of_server() for _ in range(2)]


def sent(sets: KeptSets) -> dict[str, str]:
    body = json.loads(json.dumps(kept_body(sets)))
    assert isinstance(body, dict)
    return body


def text(*values: int) -> str:
    return base64.b64encode(np.asarray(values, "<i4").tobytes()).decode()


def test_sets_arrive_as_they_were_sent() -> None:
    for vocab in (320, 321, 351, 352, 1000):
        sets = KeptSets.of(SETS, vocab)
        body = sent(sets)
        assert kept_of(body, TOKENS, FILTERED, vocab) == sets
        request = request_of(0)
        assert len(json.dumps(body)) < 64 + kept_bytes([request], vocab)
    assert kept_of(None, TOKENS, replace(FILTERED, top_p=1.0, top_k=0), VOCAB) is None
    assert kept_bytes([request_of(0, replace(FILTERED, top_p=1.0, top_k=0))], VOCAB) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "did not send which tokens"),
        ({"counts": text(1)}, "exactly the fields"),
        ({"counts": text(1), "words": 3}, "int32 .*base64"),
        ({"counts": text(1), "words": "AAA"}, "int32 .*base64"),
        ({"counts": text(1), "words": "AAAA"}, "int32 .*base64"),
        ({"counts": text(1, 1), "words": text(5, 5)}, "kept for 2 tokens, but 1 tokens"),
        ({"counts": text(0), "words": text()}, "empty or longer than the vocabulary"),
        ({"counts": text(-3), "words": text()}, "empty or longer than the vocabulary"),
        ({"counts": text(321), "words": text(*[-1] * 10)}, "empty or longer than the vocabulary"),
        ({"counts": text(2), "words": text(5)}, "their counts need 2"),
        ({"counts": text(2), "words": text(5, 5)}, "length is not the one that it states"),
        ({"counts": text(2), "words": text(5, 4)}, "length is not the one that it states"),
        ({"counts": text(2), "words": text(5, 320)}, "length is not the one that it states"),
        ({"counts": text(2), "words": text(-1, 5)}, "length is not the one that it states"),
        ({"counts": text(11), "words": text(*[1 << 5, *[0] * 9])}, "length is not the one that it states"),
        ({"counts": text(2), "words": text(4, 6)}, "token 0 .5. is not among the tokens"),
        ({"counts": text(288), "words": text(0, *[-1] * 9)}, "token 0 .5. is not among the tokens"),
    ],
)
def test_sets_are_checked(body: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        kept_of(body, [5], FILTERED, VOCAB)


def test_bits_beyond_the_vocabulary_are_no_tokens() -> None:
    body = {"counts": text(11), "words": text(2047 << 5, *[0] * 9)}
    assert kept_of(body, [5], FILTERED, 310) is not None
    body = {"counts": text(11), "words": text(1023 << 5, *[0] * 8, 1 << 21)}
    assert kept_of(body, [5], FILTERED, 310) is not None
    body["words"] = text(1023 << 5, *[0] * 8, 1 << 22)
    with pytest.raises(WireError, match="length is not the one that it states"):
        kept_of(body, [5], FILTERED, 310)


def test_sets_that_nobody_asked_for_are_refused() -> None:
    with pytest.raises(WireError, match="top_p, top_k and min_p"):
        kept_of(sent(KeptSets.of([[5]], VOCAB)), [5], replace(FILTERED, top_p=1.0, top_k=0), VOCAB)


def request_of(sibling: int, sampling: SamplingParams = FILTERED) -> GenerationRequest:
    turn = TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=sibling)
    return GenerationRequest(turn=turn, prompt_token_ids=(3, 4, 5, 6), sampling=sampling)


class Recording(HeldEngine):
    """Stands in for an engine that records kept sets: `sets` makes them of the sampled tokens."""

    def __init__(self, policy: Policy, sets: Callable[[list[int]], KeptSets | None]) -> None:
        super().__init__(policy, max_rows=8)
        self._sets = sets

    def submit(self, request: GenerationRequest) -> int:
        return super().submit(replace(request, sampling=replace(request.sampling, top_p=1.0, top_k=0)))

    def results(self) -> Iterator[Completion]:
        for completion in super().results():
            yield replace(completion, kept=self._sets(completion.token_ids.tolist()))


def around(tokens: list[int]) -> KeptSets:
    """Sets of one to many tokens, each with the sampled one."""
    return KeptSets.of([{t, *range(7 * n)} for n, t in enumerate(tokens)], VOCAB)


def test_a_server_sends_the_sets_of_its_engine(policies: list[Policy]) -> None:
    with running(policies[0], engine=Recording(policies[0], around)) as server:
        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[1]), 0)
        numbers = {engine.submit(request_of(sibling)) for sibling in range(3)}
        found = {c.request_id: c for c in engine.results()}
        assert found.keys() == numbers and engine.take_notices() == []
        for completion in found.values():
            assert completion.kept == around(completion.token_ids.tolist())
            assert len(completion.token_ids) == 6
        engine.close()
        assert server.failed == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (lambda tokens: None, "did not send which tokens"),
        (lambda tokens: around(tokens).part(0, len(tokens) - 1), "kept for 5 tokens, but 6 tokens"),
        (
            lambda tokens: KeptSets.of([[(t + 1) % VOCAB] for t in tokens], VOCAB),
            "not among the tokens that were kept for it",
        ),
    ],
)
def test_a_server_whose_sets_cannot_be_right_is_used_no_longer(
    policies: list[Policy], sets: Callable[[list[int]], KeptSets | None], words: str
) -> None:
    with running(policies[0], engine=Recording(policies[0], sets)) as server:
        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[1]), 0)
        engine.submit(request_of(0))
        with pytest.raises(EngineLost, match=words):
            list(engine.results())
        engine.close()


def test_a_server_with_vllm_takes_filters_with_a_top_k_that_vllm_lists(policies: list[Policy]) -> None:
    body = json.loads(json.dumps(request_body(request_of(0))))
    (found,) = requests_of([body], status_of(policies[0])).values()
    assert found == request_of(0)
    about = status_of(policies[0], engine="vllm")
    assert list(requests_of([body], about).values()) == [found]
    body["sampling"]["top_k"] = 0
    with pytest.raises(WireError, match="only with a top_k of 1 to"):
        requests_of([body], about)
    whole = request_of(0, replace(FILTERED, top_p=1.0, top_k=0))
    assert list(requests_of([json.loads(json.dumps(request_body(whole)))], about).values()) == [whole]
