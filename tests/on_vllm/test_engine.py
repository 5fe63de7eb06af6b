"""The engine on vLLM's build for CPUs: what it samples, what it holds, and each fault of a publish."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
import torch

from covey.data.text import load_codec
from covey.quickstart import task
from covey.rollout.stop_strings import StopSearch
from covey.rollout.vllm import library
from covey.rollout.vllm.engine import VllmEngine
from covey.types import Finish
from support.engines import plain, sampled
from support.media import unseen
from support.vllm_learner import Learner, prompts, request_of, settings

pytestmark = pytest.mark.vllm

# Of float32 on both sides; the faults below are a hundred times and more.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def state() -> dict[str, object]:
    """What a process is before vLLM is in it."""
    return {}


@pytest.fixture(scope="module")
def engine(start, learner: Learner, state) -> Iterator[VllmEngine]:
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    state["before"] = (random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist())
    state["threads"] = (torch.get_num_threads(), torch.get_default_dtype(), torch.set_num_threads)
    with start() as started:
        state["after"] = (random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist())
        state["threads after"] = (torch.get_num_threads(), torch.get_default_dtype(), torch.set_num_threads)
        yield started


@pytest.fixture
def served(engine: VllmEngine, learner: Learner) -> VllmEngine:
    """The engine with the learner's weights."""
    receipt = engine.publish(learner.weights(), 0)
    assert learner.agrees_with(receipt)
    return engine


def test_the_process_is_as_it_was(engine: VllmEngine, state) -> None:
    before, after = state["before"], state["after"]
    assert before[0] == after[0] and before[2] == after[2] and torch.equal(before[1], after[1])
    assert state["threads"] == state["threads after"]


def test_nothing_is_sampled_before_the_first_publish(engine: VllmEngine) -> None:
    fresh = VllmEngine(settings(), engine._llm)
    with pytest.raises(RuntimeError, match="no weights"):
        fresh.submit(request_of([1, 2, 3]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_learner_at_the_temperature(
    served: VllmEngine, learner: Learner, temperature: float
) -> None:
    requests = [request_of(p, i, temperature=temperature) for i, p in enumerate(prompts())]
    assert learner.gaps(served, requests) < CLOSE
    # Another temperature would show.
    requests = [request_of(p, temperature=0.9) for p in prompts(2)]
    completions = sampled(served, requests)
    wrong = [request_of(p, temperature=1.0) for p in prompts(2)]
    assert max(map(learner.gap, wrong, completions)) > 0.01


def test_a_seed_draws_the_same_alone_late_and_in_a_batch(served: VllmEngine) -> None:
    requests = [request_of(p, i) for i, p in enumerate(prompts())]
    first = [c.token_ids for c in sampled(served, requests)]
    assert [c.token_ids for c in sampled(served, requests)] == first
    assert [sampled(served, [request])[0].token_ids for request in requests] == first
    numbers = [served.submit(requests[0])]
    found = {}
    for completion in served.results():
        found[completion.request_id] = plain(completion).token_ids
        if len(numbers) == 1:
            numbers += [served.submit(request) for request in requests[1:]]
    assert [found[number] for number in numbers] == first
    siblings = {c.token_ids for c in sampled(served, [request_of([5, 6, 7], s) for s in range(8)])}
    assert len(siblings) > 4


def test_an_end_is_a_token_of_the_request_alone(served: VllmEngine) -> None:
    whole = sampled(served, [request_of([5, 6, 7], max_new_tokens=20)])[0]
    assert whole.finish is Finish.LENGTH and len(whole.token_ids) == 20
    end = whole.token_ids[7]
    at = whole.token_ids.index(end)
    cut = sampled(served, [request_of([5, 6, 7], max_new_tokens=20, stop_token_ids=(end,))])[0]
    assert cut.finish is Finish.STOP
    assert cut.token_ids == whole.token_ids[: at + 1] and len(cut.logprobs) == at + 1
    assert cut.versions == (0,) * (at + 1)


@pytest.mark.parametrize("strings", [("</answer>",), ("4",), ("nk>", "3+"), ("0</a", "答")])
def test_an_end_is_the_token_that_completes_a_stop_string(
    served: VllmEngine, strings: tuple[str, ...]
) -> None:
    """The same one as on the other engines: what vLLM samples is cut where the search finds it."""
    tokenizer = load_codec(task.MODEL_DIR).tokenizer
    asked = [request_of(p, i, max_new_tokens=40) for i, p in enumerate(chats())]
    free = sampled(served, asked)
    stopping = [replace(r, sampling=replace(r.sampling, stop_strings=strings)) for r in asked]
    found = sampled(served, stopping)
    ends = [StopSearch(tokenizer, strings).first_end(c.token_ids) for c in free]
    assert any(ends)
    for one, whole, end in zip(found, free, ends, strict=True):
        assert one.token_ids == whole.token_ids[:end] and one.logprobs == whole.logprobs[:end]
        assert one.finish is (Finish.LENGTH if end is None else Finish.STOP)
        assert len(one.versions) == len(one.token_ids)
    # Nothing of what was ended is left in vLLM.
    assert not served._llm.llm_engine.has_unfinished_requests()
    last = [replace(stopping[0], sampling=replace(stopping[0].sampling, max_new_tokens=ends[0] or 1))]
    assert ends[0] is None or sampled(served, last)[0].finish is Finish.STOP


def chats() -> list[list[int]]:
    """Prompts of the embedded task as the model was trained on them."""
    codec = load_codec(task.MODEL_DIR)
    return [[*ids] for ids in codec.encode([codec.render(r["messages"]) for r in task.training_rows()[:12]])]


def test_the_likeliest_token(served: VllmEngine, learner: Learner) -> None:
    completion = sampled(served, [request_of([5, 6, 7], temperature=1e-6)])[0]
    assert set(completion.logprobs) == {0.0}
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    with torch.no_grad():
        likeliest = learner.policy.model(ids).logits[0, 2:-1].argmax(-1)
    assert tuple(likeliest.tolist()) == completion.token_ids


def test_a_publish_is_sampled_from(served: VllmEngine, learner: Learner) -> None:
    """All of it, also the head, which the CPU build packs, and nothing of the former prompts."""
    requests = [request_of(p, i) for i, p in enumerate(prompts())]
    sampled(served, requests)
    for version in (1, 2):
        other = learner.changed(version)
        receipt = served.publish(other.weights(), version)
        assert receipt.version == version and other.agrees_with(receipt)
        assert "model.embed_tokens.weight" in receipt.fingerprints
        completions = sampled(served, requests)
        assert max(map(other.gap, requests, completions)) < CLOSE
        assert max(map(learner.gap, requests, completions)) > 0.01
        assert {v for c in completions for v in c.versions} == {version}


def test_what_is_unread_is_what_the_cpu_build_packs(served: VllmEngine, learner: Learner) -> None:
    receipt = served.publish(learner.weights(), 3)
    linear = {n for n in learner.given if n.endswith("_proj.weight")}
    assert set(receipt.unread) <= linear
    assert {n for n in learner.given if "norm" in n or "bias" in n} <= receipt.fingerprints.keys()


def test_a_tied_head_that_stays_old(
    served: VllmEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of vLLM's reload on a CPU: every fingerprint is right, and the logprobs are not."""
    monkeypatch.setattr(library, "pack_again", lambda layer: None)
    other = learner.changed(4)
    assert other.agrees_with(served.publish(other.weights(), 4))
    assert other.gaps(served, [request_of(p) for p in prompts()]) > 0.05


def test_a_cache_that_is_not_reset(
    served: VllmEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request_of(prompts()[-1], i) for i in range(4)]
    sampled(served, requests)
    monkeypatch.setattr(served._llm, "reset_prefix_cache", lambda **_: True)
    other = learner.changed(5)
    served.publish(other.weights(), 5)
    assert other.gaps(served, requests) > 0.01


def test_a_cache_that_cannot_be_reset_is_a_failed_publish(
    served: VllmEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        served.publish(learner.weights(), 6)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_tensor_that_is_not_sent_is_named(served: VllmEngine, learner: Learner, name: str) -> None:
    receipt = served.publish(learner.changed(7).weights(name), 7)
    sent = learner.given.keys() - {name}
    assert (receipt.fingerprints.keys() | set(receipt.unread)) - sent == {name}


def test_a_publish_that_breaks_off_leaves_no_mixture_behind(served: VllmEngine, learner: Learner) -> None:
    other = learner.changed(8)

    def breaking():
        for number, (name, tensor) in enumerate(other.weights()):
            if number == 9:
                raise ValueError("the connection ended")
            yield name, tensor

    with pytest.raises(ValueError, match="the connection ended"):
        served.publish(breaking(), 8)
    with pytest.raises(RuntimeError, match="no weights"):
        served.submit(request_of([1, 2, 3]))
    assert other.agrees_with(served.publish(other.weights(), 9))
    assert other.gaps(served, [request_of(p) for p in prompts()]) < CLOSE


def test_abort_keeps_what_was_sampled(served: VllmEngine, learner: Learner) -> None:
    long = request_of([5, 6, 7], 1, max_new_tokens=60)
    first, second = served.submit(long), served.submit(request_of([5, 6, 7], 2, max_new_tokens=6))
    found = {}
    for completion in served.results():
        found[completion.request_id] = completion
        if completion.request_id == second:
            served.abort([first, 12345])
    assert found[second].finish is Finish.LENGTH and len(found[second].token_ids) == 6
    assert found[first].finish is Finish.ABORT and 0 < len(found[first].token_ids) < 60
    assert learner.gap(long, found[first]) < CLOSE
    assert not served._llm.llm_engine.has_unfinished_requests()
    assert sampled(served, [request_of([5, 6, 7])])[0].finish is Finish.LENGTH


def test_what_is_too_long_is_refused(served: VllmEngine) -> None:
    with pytest.raises(ValueError, match="256"):
        served.submit(request_of([5] * 250, max_new_tokens=7))
    assert len(sampled(served, [request_of([5] * 250, max_new_tokens=6)])[0].token_ids) == 6


def test_rest_changes_nothing_on_a_cpu(served: VllmEngine, learner: Learner) -> None:
    served.rest()
    assert learner.gaps(served, [request_of(p) for p in prompts()]) < CLOSE


def test_a_longer_turn_is_sampled_as_alone(
    served: VllmEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's prefix cache has the blocks of the earlier turn; nothing of them shows."""
    first = request_of(prompts()[4], max_new_tokens=40)
    (done,) = sampled(served, [replace(first, may_go_on=True)])
    longer = replace(
        first,
        turn=replace(first.turn, turn=1),
        prompt_token_ids=(*first.prompt_token_ids, *done.token_ids, 5, 6, 7),
        extends=first.turn,
    )
    cached, step = [], served._llm.llm_engine.step

    def counting():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(served._llm.llm_engine, "step", counting)
    (found,) = sampled(served, [longer])
    assert learner.gap(longer, found) < CLOSE
    # Whole blocks of 32 of the 97 tokens, of which the last one was fed to nobody.
    assert len(longer.prompt_token_ids) == 57 + 40 + 3 and max(cached) == 96
    served.publish(learner.weights(), 0)
    (again,) = sampled(served, [longer])
    assert again.token_ids == found.token_ids


def test_media_are_refused(served: VllmEngine) -> None:
    with pytest.raises(ValueError, match="without their pixels"):
        served.submit(replace(request_of([5, 6, 7]), media=(unseen("an image"),)))


def test_weights_come_while_requests_run(served: VllmEngine, learner: Learner) -> None:
    """Each token is of one version, and its logprob that of these weights for all that is before it."""
    other = learner.changed(11)
    long, late = request_of([5, 6, 7], 1, max_new_tokens=60), request_of([5, 6, 7], 3, max_new_tokens=6)
    numbers = [served.submit(long), served.submit(request_of([5, 6, 7], 2, max_new_tokens=6))]
    found = {}
    for completion in served.results():
        found[completion.request_id] = plain(completion)
        if len(found) == 1:
            assert other.agrees_with(served.publish(other.weights(), 12))
            numbers.append(served.submit(late))
    running = found[numbers[0]]
    old = running.versions.index(12)
    assert 0 < old < 60 and len(running.versions) == len(running.logprobs) == 60
    assert set(running.versions[:old]) == {0} and set(running.versions[old:]) == {12}
    before = replace(running, token_ids=running.token_ids[:old], logprobs=running.logprobs[:old])
    assert learner.gap(long, before) < CLOSE
    behind = replace(long, prompt_token_ids=(*long.prompt_token_ids, *running.token_ids[:old]))
    after = replace(running, token_ids=running.token_ids[old:], logprobs=running.logprobs[old:])
    # vLLM has computed the row again: nothing of the former keys and values is left.
    assert other.gap(behind, after) < CLOSE
    assert set(found[numbers[2]].versions) == {12} and other.gap(late, found[numbers[2]]) < CLOSE
    served.publish(learner.weights(), 0)
