"""Completions under filters of sampling: the recorded sets against a float64 oracle on the model's own
logits, and what may not change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.kernels import choose
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.models.policy import Policy
from covey.rollout.generate import GenerateEngine
from covey.rollout.native import caches
from covey.rollout.native.engine import NativeEngine
from covey.types import Completion, Finish, GenerationRequest
from support.filters import kept_slowly
from support.needs import need
from support.recording import record
from support.syncs import Syncs

SETTINGS = (
    {"top_p": 0.8},
    {"top_k": 6},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {},
    {"top_k": 1},
    {"top_p": 0.999},
)
# A set lies within rounding of the oracle's: tokens whose mass before them is that close to top_p differ.
_ROUNDING = 1e-4


@pytest.fixture(params=["flat", "shared", "compiled flat", "compiled shared"])
def layout(request, monkeypatch, quickstart_policy):
    """Prompts copied to their rows and prompts read where they are, in torch and in C."""
    if "shared" in request.param:
        monkeypatch.setattr(caches, "_FLAT_PROMPT", 0)
    if "compiled" in request.param:
        need("a C compiler")
    else:
        monkeypatch.setattr(choose, "open_library", lambda: None)
        monkeypatch.setattr(quickstart_policy, "_kernels", CpuKernels(None))
    return request.param


def completions(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """In the order of the requests."""
    numbers = [engine.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in engine.results()}
    return [done[number] for number in numbers]


@pytest.fixture
def filtered(requests_of, random_prompts) -> Callable[..., list[GenerationRequest]]:
    """Siblings of three prompts, with filters of their own each and temperatures of their own."""

    def make(siblings: int = 7, prompts=(9, 3, 14), **changes: Any) -> list[GenerationRequest]:
        changes = {"stop": (5, 17, 40), "max_new_tokens": 12, **changes}
        return [
            replace(r, sampling=replace(r.sampling, temperature=(0.7, 1.0)[n % 2], **SETTINGS[n % 7]))
            for n, r in enumerate(requests_of(random_prompts(*prompts), siblings, **changes))
        ]

    return make


def assert_sets_are_of(policy: Policy, requests: Sequence[GenerationRequest], done: Sequence[Completion]):
    """Each set is the oracle's on the logits of a plain forward pass, but for tokens at the very border, and
    each logprob is within it."""
    num, num_border, sizes = 0, 0, set()
    for request, completion in zip(requests, done, strict=True):
        if not request.sampling.has_filters:
            assert completion.kept is None
            continue
        sampling, kept = request.sampling, completion.kept
        assert kept is not None and kept.vocab == policy.vocab and len(kept) == len(completion.token_ids)
        for logit_V, token, logprob, own in zip(
            scaled(policy, request, completion), completion.token_ids, completion.logprobs, kept, strict=True
        ):
            settings = sampling.top_p, sampling.top_k, sampling.min_p
            expected, own_ids = kept_slowly(logit_V, *settings), own.tolist()
            if own_ids != expected:
                assert_at_the_border(logit_V, set(own_ids) ^ set(expected), settings)
                num_border += 1
            assert token in own_ids
            within = logit_V[token] - np.logaddexp.reduce(logit_V[own_ids])
            assert logprob == pytest.approx(within, abs=1e-4)
            num += 1
            sizes.add(len(own_ids))
    assert num > 50 and num_border <= num // 50 and len(sizes) > 5
    return sizes


def scaled(policy: Policy, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """Float64 logits of each sampled token, divided by the temperature."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids.tolist()]])
    stream = policy.stream
    policy.use_stream("padded")
    with torch.no_grad():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0]
    policy.use_stream(stream)
    own = logits[len(request.prompt_token_ids) - 1 : -1].double() / request.sampling.temperature
    return own.numpy()


def assert_at_the_border(logit_V: np.ndarray, differing: set[int], settings: tuple[float, int, float]):
    """A little less and a little more of each filter take in or leave out what differs."""
    top_p, top_k, min_p = settings
    few = kept_slowly(logit_V, top_p * (1 - _ROUNDING), top_k, min_p * (1 + _ROUNDING))
    many = kept_slowly(logit_V, min(1, top_p * (1 + _ROUNDING)), top_k, min_p * (1 - _ROUNDING))
    assert differing <= set(many) - set(few)


def contents(done: Sequence[Completion]) -> list[object]:
    """Tokens, sets as lists, and ends."""
    return [
        (c.token_ids.tolist(), None if c.kept is None else [own.tolist() for own in c.kept], c.finish)
        for c in done
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_recorded_sets_are_the_oracles(layout, family, tiny_policy, filtered):
    policy, requests = tiny_policy(family), filtered()
    done = completions(NativeEngine(policy), requests)
    sizes = assert_sets_are_of(policy, requests, done)
    # Some are longer than a bitmap of three words.
    assert min(sizes) == 1 and max(sizes) > 3
    assert {c.finish for c in done} == {Finish.STOP, Finish.LENGTH}


def test_the_embedded_model(layout, quickstart_policy, quickstart_codec, requests_of):
    prompts = [quickstart_codec.encode([f"{n} + 2 ="])[0] for n in range(4)]
    requests = [
        replace(r, sampling=replace(r.sampling, **SETTINGS[n % 7]))
        for n, r in enumerate(requests_of(prompts, 7, stop=quickstart_codec.stop_token_ids))
    ]
    done = completions(NativeEngine(quickstart_policy), requests)
    assert_sets_are_of(quickstart_policy, requests, done)
    assert contents(done) == contents(completions(GenerateEngine(quickstart_policy), requests))


@pytest.mark.parametrize(("stride", "max_rows"), [(1, 256), (4, 5), (40, 1)])
def test_what_rows_are_batched_with_does_not_matter(layout, stride, max_rows, tiny_policy, filtered):
    policy, requests = tiny_policy("llama"), filtered()
    alone = [completions(NativeEngine(policy, stride=1), [request])[0] for request in requests]
    done = completions(NativeEngine(policy, max_rows=max_rows, stride=stride), requests)
    assert contents(done) == contents(alone)


@pytest.mark.parametrize("prompts", [(9, 3, 14), (70, 66, 90)], ids=["flat", "prefix"])
def test_recorded_strides_give_the_same_sets(prompts, tiny_policy, filtered):
    """Of rows with filters, of rows without any, and of both side by side, from one size to the next."""
    policy = tiny_policy("llama")
    recordings = Recordings(record)
    engine = NativeEngine(policy, max_rows=5, stride=3, kernels=GpuKernels(recordings))
    for number in range(4):
        requests = filtered(prompts=prompts, rollout=number)
        if number == 2:
            requests = [r for r in requests if not r.sampling.has_filters]
        expected = completions(NativeEngine(policy, max_rows=5), requests)
        assert contents(completions(engine, requests)) == contents(expected)
    assert recordings.failure == "" and len(recordings) >= 3


def test_a_recorded_stride_never_waits(tiny_policy, filtered):
    policy = tiny_policy("llama").to("meta")
    engine = NativeEngine(policy, stride=8, kernels=GpuKernels(Recordings(lambda compute: lambda: None)))
    requests = filtered(2, prompts=(70, 66, 90))
    assert {r.sampling.has_filters for r in requests} == {True, False}
    with Syncs() as syncs:
        for request in requests:
            engine.submit(request)
        assert len(list(engine.results())) == 6
    # Tokens, logprobs and sets, of the first draw and of two strides; a recording is compared once.
    assert dict(syncs.found) == {
        "rollout/native/engine.py: _take": 2 * 3,
        "rollout/filters.py: kept_sets": 3,
        "kernels/gpu/recordings.py: _made": 2,
    }


def test_rows_without_filters_draw_the_same_beside_rows_with_them(layout, tiny_policy, filtered):
    policy, requests = tiny_policy("llama"), filtered()
    plain = [replace(r, sampling=replace(r.sampling, top_p=1.0, top_k=0, min_p=0.0)) for r in requests]
    expected = completions(NativeEngine(policy), plain)
    assert {c.kept for c in expected} == {None}
    done = completions(NativeEngine(policy), requests)
    own = [number for number, r in enumerate(requests) if not r.sampling.has_filters]
    assert contents([done[n] for n in own]) == contents([expected[n] for n in own])
    assert contents(done) != contents(expected)


def test_a_row_that_is_aborted_has_the_sets_of_its_tokens(layout, tiny_policy, filtered):
    policy, requests = tiny_policy("llama"), filtered(stop=(), max_new_tokens=20)
    requests[0] = replace(requests[0], sampling=replace(requests[0].sampling, max_new_tokens=3))
    expected = completions(NativeEngine(policy), requests)
    engine = NativeEngine(policy)
    numbers = [engine.submit(request) for request in requests]
    results = engine.results()
    done = [next(results)]
    engine.abort(numbers[8:11])
    done += results
    for completion in done:
        whole = expected[numbers.index(completion.request_id)]
        length = len(completion.token_ids)
        assert (completion.finish is Finish.ABORT) == (completion.request_id in numbers[8:11])
        assert contents([completion])[0][0] == contents([whole])[0][0][:length]
        if whole.kept is not None:
            assert completion.kept == whole.kept.part(0, length)
    assert sum(c.finish is Finish.ABORT and c.kept is not None for c in done) >= 2


def test_a_turn_that_goes_on_from_a_kept_row(layout, tiny_policy, filtered):
    policy = tiny_policy("llama")
    first = [replace(r, may_go_on=True) for r in filtered(stop=(), max_new_tokens=5)]

    def next_turn(request, completion):
        return replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *completion.token_ids.tolist(), 8, 9),
            turn=replace(request.turn, turn=1),
            extends=request.turn,
            may_go_on=False,
        )

    engine = NativeEngine(policy)
    done = completions(engine, first)
    second = [next_turn(*pair) for pair in zip(first, done, strict=True)]
    found = completions(engine, second)
    assert_sets_are_of(policy, second, found)
    fresh = completions(NativeEngine(policy), [replace(r, extends=None) for r in second])
    assert contents(found) == contents(fresh)
