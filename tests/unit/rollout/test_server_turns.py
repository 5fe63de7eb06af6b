"""Turns of episodes on rollout servers, and weights that come while requests run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.queue import Queue
from covey.rollout.server.wire import request_body, requests_of
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import Plain, plain, sampled
from support.media import unseen
from support.servers import Running, engine_on, policy_of_server, running, status_of


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """Two servers' models, and the learner's."""
    return [policy_of_server() for _ in range(3)]


@pytest.fixture
def pair(policies: list[Policy]) -> Iterator[tuple[Running, Running]]:
    with ExitStack() as stack:
        one, two = (stack.enter_context(running(policy)) for policy in policies[:2])
        yield one, two
        assert one.failed == two.failed == []


def request_of(prompt: int, sibling: int = 0, new: int = 8, **changes: Any) -> GenerationRequest:
    given = {
        "turn": TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=prompt, sibling=sibling),
        "prompt_token_ids": tuple(3 + (7 * i + prompt) % 80 for i in range(prompt)),
        "sampling": SamplingParams(temperature=1.0, max_new_tokens=new, stop_token_ids=()),
        "may_go_on": True,
    }
    return GenerationRequest(**{**given, **changes})


def next_turn(request: GenerationRequest, done: Plain) -> GenerationRequest:
    return replace(
        request,
        turn=replace(request.turn, turn=request.turn.turn + 1),
        prompt_token_ids=(*request.prompt_token_ids, *done.token_ids, 5, 6, 7),
        extends=request.turn,
    )


def test_turns_go_to_the_server_that_has_the_earlier_one(
    pair: tuple[Running, Running], policies: list[Policy]
) -> None:
    """Submitted while results are read; a second turn has an id of its own, and its past is not computed."""
    engine = engine_on([server.address for server in pair])
    engine.publish(plain_weights(policies[2]), 0)
    seen: dict[TurnId, str] = {}
    for server in pair:
        real = server.engine.submit
        server.engine.submit = lambda r, real=real, s=server: (  # type: ignore[method-assign]
            seen.update({r.turn: s.address}),
            real(r),
        )[1]
    asked = {engine.submit(r): r for r in (request_of(p, s) for p in (9, 10, 11, 12) for s in (0, 1))}
    found = {}
    for completion in engine.results():
        request, done = asked[completion.request_id], plain(completion)
        found[request.turn] = request, done
        if request.turn.turn < 2:
            following = next_turn(request, done)
            asked[engine.submit(following)] = following
    assert len(found) == 24 and len(set(seen.values())) == 2
    extended = [request for request, _ in found.values() if request.extends is not None]
    assert all(seen[request.turn] == seen[request.extends] for request in extended if request.extends)
    own = NativeEngine(policies[2])
    for request, done in found.values():
        (alone,) = sampled(own, [replace(request, extends=None, may_go_on=False)])
        assert done.token_ids == alone.token_ids
    # Prompts once for two siblings, every sampled token, and of later turns the last token and three more;
    # less where siblings sampled the same.
    computed = sum(server.engine.num_computed for server in pair)
    assert 24 * 8 + sum((9, 10, 11, 12)) < computed <= 24 * 8 + sum((9, 10, 11, 12)) + 16 * 4
    engine.close()


def test_weights_come_while_requests_run(pair: tuple[Running, Running], policies: list[Policy]) -> None:
    """What runs goes on by them: its versions rise, and what is submitted then is of the new ones alone."""
    engine = engine_on([server.address for server in pair])
    weights = {name: tensor.clone() for name, tensor in plain_weights(policies[2])}
    other = {name: tensor * 1.1 for name, tensor in weights.items()}
    engine.publish(iter(weights.items()), 0)
    requests = [request_of(9, 0, new=4), *(request_of(p, new=1500) for p in (10, 11, 12))]
    asked = {engine.submit(request): number for number, request in enumerate(requests)}
    found: dict[int, Plain] = {}
    for completion in engine.results():
        if not found:
            receipt = engine.publish(iter(other.items()), 1)
            assert len(receipt.members) == 2
            asked[engine.submit(request_of(13, new=4))] = 4
        found[asked[completion.request_id]] = plain(completion)
    assert set(found[0].versions) == {0} and set(found[4].versions) == {1}
    for number in (1, 2, 3):
        versions = found[number].versions
        assert list(versions) == sorted(versions) and set(versions) == {0, 1} and len(versions) == 1500
    assert engine.take_notices() == []
    engine.close()


def test_another_process_goes_on_with_the_weights_of_the_first(
    pair: tuple[Running, Running], policies: list[Policy]
) -> None:
    first, second = (engine_on([pair[0].address], publishes=publishes) for publishes in (True, False))
    first.publish(plain_weights(policies[2]), 0)
    second.publish(iter(()), 0)
    asked = {
        second.submit(request): n
        for n, request in enumerate([request_of(9, new=4), request_of(10, new=1500)])
    }
    found: dict[int, Plain] = {}
    for completion in second.results():
        if not found:
            first.publish(plain_weights(policies[2]), 1)
            second.publish(iter(()), 1)
            asked[second.submit(request_of(13, new=4))] = 2
        found[asked[completion.request_id]] = plain(completion)
    assert set(found[0].versions) == {0} and set(found[2].versions) == {1}
    assert list(found[1].versions) == sorted(found[1].versions) and set(found[1].versions) == {0, 1}
    assert second.take_notices() == []
    for engine in (first, second):
        engine.close()


def test_what_runs_where_the_first_process_confirmed_nothing_is_sampled_again(
    pair: tuple[Running, Running], policies: list[Policy]
) -> None:
    """By a server that it has confirmed: nothing is taken of weights that nobody has checked."""
    every = [server.address for server in pair]
    first, second = (engine_on(every, publishes=publishes) for publishes in (True, False))
    ran_on: dict[int, str] = {}
    for server in pair:

        def submit(
            request: GenerationRequest, real: Any = server.engine.submit, at: str = server.address
        ) -> int:
            ran_on[request.turn.prompt_id] = at
            return int(real(request))

        server.engine.submit = submit  # type: ignore[method-assign]
    first.publish(plain_weights(policies[2]), 0)
    second.publish(iter(()), 0)
    requests = [request_of(9, new=4), *(request_of(p, new=1500) for p in (10, 11, 12, 13))]
    asked = {second.submit(request): request.turn.prompt_id for request in requests}
    found: dict[int, Plain] = {}
    ran_before: dict[int, str] = {}
    for completion in second.results():
        if not found:
            first.publish(plain_weights(policies[2]), 1)
            second.publish(iter(()), 1)
            ran_before = dict(ran_on)
            second.use_members([address for address in every if address != ran_before[10]])
        found[asked[completion.request_id]] = plain(completion)
    assert len(found) == 5
    for number in (10, 11, 12, 13):
        is_moved = ran_before[number] == ran_before[10]
        assert set(found[number].versions) == ({1} if is_moved else {0, 1})
        assert (ran_on[number] != ran_before[number]) == is_moved
    for engine in (first, second):
        engine.close()


def test_a_server_that_fails_to_take_weights_ends_what_it_runs(
    pair: tuple[Running, Running], policies: list[Policy]
) -> None:
    """No token of a mixture arrives: the other server samples it again."""
    engine = engine_on([server.address for server in pair])
    engine.publish(plain_weights(policies[2]), 0)
    requests = [request_of(9, 0, new=4), *(request_of(p, new=1200) for p in (10, 11, 12))]
    asked = {engine.submit(request): number for number, request in enumerate(requests)}
    real = pair[1].engine.publish

    def breaks(weights: Any, version: int) -> Any:
        name, tensor = next(weights)
        real(iter([(name, torch.zeros_like(tensor))]), version)

    pair[1].engine.publish = breaks  # type: ignore[method-assign]
    found: dict[int, Plain] = {}
    for completion in engine.results():
        if not found:
            assert list(engine.publish(plain_weights(policies[2]), 1).members) == [pair[0].address]
        found[asked[completion.request_id]] = plain(completion)
    own = NativeEngine(policies[2])
    for number, request in enumerate(requests):
        assert found[number].token_ids == sampled(own, [replace(request, may_go_on=False)])[0].token_ids
    (notice,) = engine.take_notices()
    assert pair[1].address in notice.seen
    engine.close()


def test_a_request_arrives_as_it_was_asked(policies: list[Policy]) -> None:
    request = replace(request_of(9), turn=replace(request_of(9).turn, turn=3), extends=request_of(9).turn)
    body = json.loads(json.dumps(request_body(request)))
    assert body["id"] == "1/train/0/0/9/0/3"
    about = status_of(policies[0])
    assert requests_of([body], about) == {body["id"]: request}


def test_equal_tokens_with_other_media_are_dealt_apart() -> None:
    """Siblings alone go to one server together."""
    queue = Queue()
    images = ("one image", "one image", "another image")
    queue.add([(n, request_of(9, n, media=(unseen(image),))) for n, image in enumerate(images)])
    assert len(queue) == 2
    assert [number for number, _ in queue.remove([0, 2])] == [0, 2] and len(queue) == 1
