"""Requests that come while others decode: whatever their length, they get what they get alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.kernels import choose
from covey.kernels.cpu.decoder import CompiledLlama
from covey.kernels.protocol import Spans
from covey.models.policy import Policy
from covey.rollout.native import caches
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import plain
from support.needs import need


@pytest.fixture(autouse=True, params=["flat", "shared", "compiled flat", "compiled shared"])
def layout(request, monkeypatch):
    if "shared" in request.param:
        monkeypatch.setattr(caches, "_FLAT_PROMPT", 0)
    if "compiled" in request.param:
        need("a C compiler")
    else:
        monkeypatch.setattr(choose, "open_library", lambda: None)
    return request.param


def request_of(prompt: int, new: int, sibling: int = 0) -> GenerationRequest:
    """A request of so many prompt tokens, which decodes so many."""
    key = TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=prompt, sibling=sibling)
    return GenerationRequest(
        prompt_token_ids=tuple(3 + (7 * i + prompt) % 80 for i in range(prompt)),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=new, stop_token_ids=()),
        turn=key,
    )


def alone(policy: Policy, request: GenerationRequest) -> tuple[int, ...]:
    engine = NativeEngine(policy)
    engine.submit(request)
    (completion,) = engine.results()
    return plain(completion).token_ids


LATE = {
    "a longer prompt": [request_of(40, 6)],
    "a prompt of the other kind of cache": [request_of(80, 6)],
    "a longer completion": [request_of(5, 60)],
    "more siblings than rows": [request_of(5, 6, sibling) for sibling in range(1, 9)],
    "all of them": [request_of(80, 40), request_of(40, 6), request_of(6, 50), request_of(5, 3, 2)],
}


@pytest.mark.parametrize("case", LATE)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_comes_late_is_sampled_as_alone(case: str, after: int, tiny_policy) -> None:
    """Before the first result, while rows run, and when all have ended."""
    policy = tiny_policy("llama")
    first = [request_of(5, new) for new in (2, 9, 17)]
    engine = NativeEngine(policy, max_rows=4)
    wanted = {engine.submit(request): request for request in first}
    found = {}
    results = engine.results()
    for number in range(len(first) + len(LATE[case])):
        if number == after:
            wanted |= {engine.submit(request): request for request in LATE[case]}
        completion = next(results)
        found[completion.request_id] = plain(completion).token_ids
    assert next(results, None) is None
    assert found == {number: alone(policy, request) for number, request in wanted.items()}


def test_what_waits_for_room_can_be_aborted(tiny_policy) -> None:
    engine = NativeEngine(tiny_policy("llama"))
    engine.submit(request_of(5, 4))
    engine.submit(request_of(5, 12, 1))
    results = engine.results()
    next(results)
    late = engine.submit(request_of(80, 40))
    engine.abort([late])
    assert {c.request_id: str(c.finish) for c in results} == {1: "length", late: "abort"}


def test_a_generator_that_was_left_alone_and_another(tiny_policy) -> None:
    """What still runs goes on beside what was submitted since."""
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    requests = [request_of(5, 3), request_of(5, 20, 1)]
    for request in requests:
        engine.submit(request)
    first = next(engine.results())
    requests.append(request_of(80, 30))
    engine.submit(requests[2])
    rest = list(engine.results())
    found = {c.request_id: plain(c).token_ids for c in [first, *rest]}
    assert found == {i: alone(policy, request) for i, request in enumerate(requests)}


@pytest.mark.parametrize("faulty", [request_of(0, 4), request_of(4, 0)], ids=["no prompt", "no new token"])
def test_what_cannot_be_sampled_is_refused(faulty: GenerationRequest, tiny_policy) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NativeEngine(tiny_policy("llama")).submit(faulty)


@pytest.mark.parametrize("field", ["slot", "slot_count", "row", "row_count", "row_first"])
def test_nothing_beyond_the_cache_reaches_the_library(field: str, tiny_policy, layout: str) -> None:
    """Every place that the library would read or write at is looked at before it is called."""
    if "compiled" not in layout:
        pytest.skip("the library is not called")
    engine = NativeEngine(tiny_policy("llama"))
    engine.submit(request_of(5, 4))
    list(engine.results())
    step, cache = engine._decoding._decoder, engine._cache
    assert isinstance(step, CompiledLlama) and cache is not None
    one = torch.ones(1, dtype=torch.long)

    class Layout:
        longest = 8

        def __init__(self, **changes: torch.Tensor) -> None:
            self.cache = cache
            zero = torch.zeros(1, dtype=torch.long)
            self._spans = replace(Spans(zero, zero, zero, zero, zero, one), **changes)

        def spans(self, positions_n: torch.Tensor) -> Spans:
            return self._spans

    step.hidden(one, one, Layout())
    for beyond in (-1, 10**6):
        with pytest.raises(IndexError):
            step.hidden(one, one, Layout(**{field: torch.tensor([beyond])}))
    with pytest.raises(IndexError):
        step.hidden(torch.tensor([10**6]), one, Layout())
    with pytest.raises(IndexError):
        step.hidden(one, torch.tensor([10**6]), Layout())
    with pytest.raises(IndexError):
        step.copy_rows(cache, [0], [cache.shape.rows], range(2))
