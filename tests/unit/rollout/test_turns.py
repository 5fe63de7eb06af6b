"""Turns that extend others: what they sample is what a fresh engine samples, with fewer tokens computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.kernels import choose
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.rollout.generate import GenerateEngine
from covey.rollout.native import caches, kept
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import Plain, plain
from support.media import unseen
from support.needs import need
from support.recording import record

CLOSE = 2e-5


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def layout(request, monkeypatch):
    if request.param == "compiled":
        need("a C compiler")
    else:
        monkeypatch.setattr(choose, "open_library", lambda: None)
    return request.param


def first_turn(prompt: int, sibling: int = 0, new: int = 9, **changes) -> GenerationRequest:
    """The first turn of an episode that may go on, of so many prompt tokens."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new + sibling, stop_token_ids=(17, 40))
    given = {"may_go_on": True, **changes}
    return GenerationRequest(
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=prompt, sibling=sibling),
        prompt_token_ids=tuple(3 + (7 * i + prompt) % 80 for i in range(prompt)),
        sampling=sampling,
        **given,
    )


def next_turn(request: GenerationRequest, done: Plain, bridge: int = 5) -> GenerationRequest:
    """What goes on from a turn, with so many tokens between."""
    between = tuple(50 + (3 * i + len(done.token_ids)) % 40 for i in range(bridge))
    return replace(
        request,
        turn=replace(request.turn, turn=request.turn.turn + 1),
        prompt_token_ids=(*request.prompt_token_ids, *done.token_ids, *between),
        extends=request.turn,
    )


def alone(policy, request: GenerationRequest) -> Plain:
    """What an engine samples that is asked for nothing else."""
    engine = NativeEngine(policy)
    engine.submit(replace(request, extends=None))
    (completion,) = engine.results()
    return plain(completion)


def episodes(engine, requests, turns=3, make=next_turn) -> list[tuple[GenerationRequest, Plain]]:
    """Every turn of the episodes, each submitted as soon as the one before it has ended."""
    asked = {engine.submit(request): request for request in requests}
    found = []
    for completion in engine.results():
        request, done = asked[completion.request_id], plain(completion)
        found.append((request, done))
        if request.turn.turn + 1 < turns:
            following = make(request, done)
            asked[engine.submit(following)] = following
    assert len(found) == turns * len(requests)
    return found


def assert_as_alone(policy, found) -> None:
    for request, done in found:
        expected = alone(policy, request)
        assert (done.token_ids, done.finish) == (expected.token_ids, expected.finish)
        assert done.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)


# Short prompts, and such that are prefilled by blocks.
PROMPTS = {"short": (9, 4), "long": (70, 12)}


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize(
    ("family", "stride"), [("llama", 1), ("llama", 3), ("gemma2", 3), ("gpt_oss", 3), ("gpt2", 3)]
)
def test_turns_are_those_of_a_fresh_engine_and_cost_less(family, prompts, stride, tiny_policy) -> None:
    """With siblings, beside rows that decode, and over several turns; windows end within a turn."""
    policy = tiny_policy(family)
    requests = [first_turn(prompt, s) for prompt in PROMPTS[prompts] for s in range(3)]
    engine, anew = (NativeEngine(policy, max_rows=5, stride=stride) for _ in range(2))
    found = episodes(engine, requests, turns=2 if family == "gpt2" else 3)
    assert_as_alone(policy, found)
    episodes(
        anew,
        requests,
        turns=2 if family == "gpt2" else 3,
        make=lambda *turn: replace(next_turn(*turn), extends=None),
    )
    # All of a turn but its last token is there already.
    reused = sum(len(r.prompt_token_ids) - 5 - 1 for r, _ in found if r.extends is not None)
    assert anew.num_computed - engine.num_computed == reused > 0
    engine.rest()
    assert len(engine._kept) == 0


@pytest.mark.parametrize("prompts", PROMPTS)
def test_turns_by_recordings(prompts, tiny_policy) -> None:
    policy = tiny_policy("llama")
    recordings = Recordings(record)
    engine = NativeEngine(policy, max_rows=5, stride=3, kernels=GpuKernels(recordings))
    requests = [first_turn(prompt, s) for prompt in PROMPTS[prompts] for s in range(3)]
    for _ in range(2):
        assert_as_alone(policy, episodes(engine, requests))
        engine.rest()
    assert recordings.failure == ""


def one_turn(engine, request: GenerationRequest) -> Plain:
    engine.submit(request)
    (completion,) = engine.results()
    return plain(completion)


def test_a_turn_after_all_rows_have_ended(tiny_policy) -> None:
    """As when a tool takes long: the row is there until the engine rests."""
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    first = first_turn(9)
    following = next_turn(first, one_turn(engine, first))
    before = engine.num_computed
    done = one_turn(engine, following)
    assert engine.num_computed - before == 5 + 1 + len(done.token_ids)
    assert done.token_ids == alone(policy, following).token_ids


ODD = {
    "another token of the prompt": lambda r: {"prompt_token_ids": (90, *r.prompt_token_ids[1:])},
    "a turn that was never sampled": lambda r: {"extends": replace(r.turn, prompt_id=77)},
    "other media": lambda r: {"media": (unseen("another image"),)},
    "no media": lambda r: {"media": ()},
}


@pytest.mark.parametrize("what", ODD)
def test_what_does_not_extend_a_row_is_computed_anew(what, tiny_policy) -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    first = first_turn(9, media=(unseen("an image"),))
    following = next_turn(first, one_turn(engine, first))
    following = replace(following, **ODD[what](following))
    before = engine.num_computed
    done = one_turn(engine, following)
    assert engine.num_computed - before == len(following.prompt_token_ids) + len(done.token_ids)
    assert done.token_ids == alone(policy, following).token_ids


@pytest.mark.parametrize("left", [0, 1, 3, 6])
@pytest.mark.parametrize("added", [(), (90, 91)])
def test_a_turn_that_was_cut_goes_on_from_what_is_left(
    left: int, added: tuple[int, ...], tiny_policy
) -> None:
    """The keys and values of what stands in front of the cut are there; one token at least is computed."""
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    first = first_turn(9)
    turn = one_turn(engine, first)
    assert len(turn.token_ids) > 6 and not set(added) & set(turn.token_ids)
    whole = next_turn(first, turn)
    following = replace(whole, prompt_token_ids=(*first.prompt_token_ids, *turn.token_ids[:left], *added))
    before = engine.num_computed
    done = one_turn(engine, following)
    assert engine.num_computed - before == max(len(added), 1) + len(done.token_ids)
    expected = alone(policy, following)
    assert done.token_ids == expected.token_ids
    assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_row_is_not_kept_over_a_publish_nor_unasked(tiny_policy) -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    one_turn(engine, first_turn(9, may_go_on=False))
    assert len(engine._kept) == 0
    first = first_turn(9)
    following = next_turn(first, one_turn(engine, first))
    assert len(engine._kept) == 1
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    engine.publish(iter(()), 1)
    assert len(engine._kept) == 0
    done = one_turn(engine, following)
    assert done.token_ids == alone(policy, following).token_ids and set(done.versions) == {1}


def test_where_memory_is_short_the_first_that_ended_goes(tiny_policy, monkeypatch) -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    requests = [first_turn(9, s, new=4) for s in range(3)]
    done = [one_turn(engine, request) for request in requests]
    assert len(engine._kept) == 3
    # Beside what is kept nothing is free, and a part of it has to go.
    monkeypatch.setattr(engine._kept, "free_bytes", lambda: 0)
    monkeypatch.setattr(kept, "_SHARE", 0.9)
    requests.append(first_turn(12, new=4))
    done.append(one_turn(engine, requests[-1]))
    assert 0 < len(engine._kept) < 4
    assert requests[0].turn not in engine._kept._rows
    following = [next_turn(*pair) for pair in zip(requests, done, strict=True)]
    for request in following:
        assert one_turn(engine, request).token_ids == alone(policy, request).token_ids


def test_what_is_held_is_counted_as_rows_come_and_go(tiny_policy) -> None:
    """A part that siblings share counts once, and is gone with the last of them: no row looks at
    the others."""
    held = kept.KeptRows(lambda: 1 << 40)

    def copied(length: int) -> kept.Copied:
        return kept.Copied({0: torch.zeros(2, 1, length, 4)}, length)

    prompt = copied(5)
    rows = [kept.KeptRow((1,) * 9, (), [prompt, copied(3 + s)]) for s in range(3)]
    turns = [first_turn(9, s).turn for s in range(3)]
    for turn, row in zip(turns, rows, strict=True):
        held.keep(turn, row)
    assert held._held == prompt.num_bytes + sum(row.parts[1].num_bytes for row in rows)
    held.keep(turns[0], rows[0])
    assert held._held == prompt.num_bytes + sum(row.parts[1].num_bytes for row in rows)
    for turn, left in zip(turns, (2, 1, 0), strict=True):
        held.take([replace(first_turn(9), extends=turn)])
        assert len(held) == left and (held._held > prompt.num_bytes) is (left > 0)
    assert held._held == 0 and not held._uses


def test_a_cache_that_cannot_grow_makes_turns_wait(tiny_policy, monkeypatch) -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    monkeypatch.setattr(caches, "rows_that_fit", lambda policy, tokens, given_back: 10 if tokens < 40 else 3)
    assert_as_alone(policy, episodes(engine, [first_turn(9, s) for s in range(6)]))


# -- prefixes and media


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_equal_tokens_with_other_media_share_nothing(engine, tiny_policy) -> None:
    policy = tiny_policy("llama")
    running = engine(policy)
    images = ("one image", "one image", "another image")
    requests = [first_turn(9, s, media=(unseen(image),), may_go_on=False) for s, image in enumerate(images)]
    numbers = [running.submit(request) for request in requests]
    done = {c.request_id: plain(c) for c in running.results()}
    decoded = sum(len(c.token_ids) for c in done.values())
    if engine is NativeEngine:
        # Two of the three are siblings.
        assert running.num_computed - decoded == 2 * 9
    assert [done[n].token_ids for n in numbers] == [alone(policy, r).token_ids for r in requests]


# -- versions


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("prompt", [9, 70])
def test_tokens_behind_a_publish_are_of_the_new_version(prompt, stride, tiny_policy) -> None:
    """Rows that run go on by the new weights: their first logprobs of them are not those of the old ones."""
    policy = tiny_policy("llama")
    requests = [
        first_turn(prompt, 0, 3, may_go_on=False),
        first_turn(prompt, 1, 40),
        first_turn(prompt, 2, 40),
    ]
    requests = [replace(r, sampling=replace(r.sampling, stop_token_ids=())) for r in requests]
    engine = NativeEngine(policy, stride=stride, max_rows=2)
    before = [alone(policy, request) for request in requests]
    asked = {engine.submit(request): n for n, request in enumerate(requests)}
    found = {}
    for completion in engine.results():
        if not found:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.3)
            engine.publish(iter(()), 4)
        found[asked[completion.request_id]] = plain(completion)
    assert found[0].versions == (0, 0, 0)
    old = found[1].versions.count(0)
    assert found[1].versions == (0,) * old + (4,) * (41 - old) and 3 <= old < 41
    assert found[1].token_ids[:old] == before[1].token_ids[:old]
    assert found[1].logprobs[:old] == pytest.approx(before[1].logprobs[:old], abs=CLOSE)
    assert abs(found[1].logprobs[old] - before[1].logprobs[old]) > 1e-3
    # One that waited beside a resident prompt is of the new weights from its first token on.
    after = alone(policy, requests[2])
    assert (set(found[2].versions), found[2].token_ids) == ({4}, after.token_ids)
    assert found[2].logprobs == pytest.approx(after.logprobs, abs=CLOSE)


def test_a_publish_before_the_first_stride(tiny_policy) -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    engine.submit(first_turn(9))

    def publish() -> None:
        engine.on_turn = lambda: None
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.3)
        engine.publish(iter(()), 2)

    engine.on_turn = publish
    (completion,) = engine.results()
    assert set(plain(completion).versions) == {2}
    assert plain(completion).token_ids == alone(policy, first_turn(9)).token_ids


# -- transformers' generate


def test_generate_takes_requests_and_versions_between_batches(tiny_policy) -> None:
    """What comes late is sampled; a batch has the version that it began with, whenever it is read."""
    policy = tiny_policy("llama")
    engine = GenerateEngine(policy)
    asked = {engine.submit(request): request for request in (first_turn(9), first_turn(9, 1))}
    found = {}
    for completion in engine.results():
        request, done = asked[completion.request_id], plain(completion)
        if not found:
            engine.publish(iter(()), 1)
            following = next_turn(request, done)
            asked[engine.submit(following)] = following
        found[request.turn] = done
    assert [set(done.versions) for done in found.values()] == [{0}, {0}, {1}]
    for number, done in zip(asked, found.values(), strict=True):
        assert done.token_ids == alone(policy, asked[number]).token_ids
