"""The canary: the learner's numbers for an engine's tokens, tokens held to their noise, and the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.rollout.canary import Bound, Canary, Comparison, canary_requests, sample_canary
from covey.rollout.noise import draws, sample, token_table
from support.engines import CopyEngine
from support.models import VOCAB, policy_of
from support.steps import OPTIMIZER

FP32, BF16 = torch.float32, torch.bfloat16


def test_draws_are_those_of_sample_and_hold_within_their_margin() -> None:
    """Below the size of a block, of a block, and of several with a short last one."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (7, 512, 1300, 5120):
        rows = 200
        logprob = torch.randn(rows, vocab, generator=generator).mul_(3).log_softmax(dim=1)
        key = torch.randint(1 << 32, (rows,), generator=generator)
        position = torch.arange(rows) % 5
        table = token_table(vocab, torch.device("cpu"))
        token, *_ = sample(logprob, torch.ones(rows), key, position, table)
        drawn, margin = draws(logprob, key, position, table)
        assert torch.equal(drawn, token)
        assert (margin >= 0).all()
        for seed in range(5):
            noise = torch.rand(rows, vocab, generator=generator.manual_seed(seed)).mul_(2).sub_(1)
            moved, _ = draws(logprob + 0.499 * margin[:, None] * noise, key, position, table)
            assert torch.equal(moved, token)


def test_the_prompts_are_fixed() -> None:
    one, two = canary_requests(VOCAB), canary_requests(VOCAB)
    assert one == two
    assert len(one) == 6
    assert all(0 <= t < VOCAB for r in one for t in r.prompt_token_ids)
    assert {r.turn.split for r in one} == {"canary"}


@pytest.mark.parametrize("stream", ["prefix", "packed", "padded"])
def test_the_learners_view_is_what_the_policy_says(stream: str) -> None:
    """On every layout, against logits of each row for itself."""
    policy = policy_of("llama")
    policy.use_stream(stream)
    backend = SingleBackend(policy, OPTIMIZER)
    requests = canary_requests(VOCAB)
    done = sample_canary(CopyEngine(policy_of("llama")), requests)
    view = learners_view(backend, lambda: None)(list(zip(requests, done, strict=True)))
    expected = []
    for request, completion in zip(requests, done, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids, **({} if stream == "padded" else _full(policy))).logits
        expected.append(logits[0, 3:-1].float().log_softmax(dim=1))
    whole = torch.cat(expected)
    tokens = torch.tensor([t for c in done for t in c.token_ids])
    torch.testing.assert_close(view.logprob_RV, whole[: len(view.logprob_RV)], rtol=0, atol=1e-5)
    torch.testing.assert_close(view.logprob_N, whole.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    assert view.logprob_RV.shape == (12, VOCAB)


def _full(policy):
    policy.use_stream("padded")
    return {}


def test_dropout_is_off_in_the_learners_view_and_on_after_it() -> None:
    policy = policy_of("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    engine = CopyEngine(policy)
    policy.train()
    canary = canary_of(policy)
    done = sample_canary(engine, canary.requests)
    assert Comparison(canary, [done]).of(done, has_keys=True, bound=1e-4).gap < 1e-4
    assert policy.training


def canary_of(policy) -> Canary:
    backend = SingleBackend(policy, OPTIMIZER)
    view = learners_view(backend, lambda: None)
    return Canary(requests=canary_requests(VOCAB), view=view, bound=Bound(FP32, FP32))


def test_equal_engines_are_asked_for_once_and_told_apart() -> None:
    policy = policy_of("llama")
    canary = canary_of(policy)
    done = sample_canary(CopyEngine(policy), canary.requests)
    asked = []

    def view(pairs):
        asked.append(len(pairs))
        return canary.view(pairs)

    wrong = (done[2].logprobs[0] + 0.5, *done[2].logprobs[1:])
    spoiled = [*done[:2], replace(done[2], logprobs=wrong), *done[3:]]
    comparison = Comparison(replace(canary, view=view), [done, spoiled])
    assert asked == [6]
    good = comparison.of(done, has_keys=True, bound=1e-4)
    assert (good.gap < 1e-4, good.wrong_token, good.num_tokens) == (True, "", 12)
    bad = comparison.of(spoiled, has_keys=True, bound=1e-4)
    assert (bad.gap, bad.at) == (pytest.approx(0.5, abs=1e-4), 4)


def test_a_token_that_its_noise_does_not_draw_is_named_by_whichever_engine() -> None:
    policy = policy_of("llama")
    canary = canary_of(policy)
    engine = CopyEngine(policy)
    done = sample_canary(engine, canary.requests)
    others = tuple(replace(r, turn=replace(r.turn, seed=5)) for r in canary.requests)
    drawn = sample_canary(engine, others)
    comparison = Comparison(canary, [done, drawn])
    assert comparison.of(done, has_keys=True, bound=1e-4).wrong_token == ""
    found = comparison.of(drawn, has_keys=True, bound=1e-4)
    first = (drawn[0].token_ids[0], done[0].token_ids[0])
    assert found.wrong_token.startswith(f"it drew token {first[0]} where the learner, with the same noise")
    assert f"draws {first[1]}, by" in found.wrong_token
    assert found.gap < 1e-4
    # No margin is above two such bounds, and an engine without keys draws as it likes.
    assert comparison.of(drawn, has_keys=True, bound=1e3).wrong_token == ""
    assert comparison.of(drawn, has_keys=False, bound=1e-4).wrong_token == ""


def test_a_number_that_is_none_is_the_largest_gap() -> None:
    policy = policy_of("llama")
    canary = canary_of(policy)
    done = sample_canary(CopyEngine(policy), canary.requests)
    lost = [replace(done[0], logprobs=(float("nan"), *done[0].logprobs[1:])), *done[1:]]
    assert Comparison(canary, [lost]).of(lost, has_keys=False, bound=1.0).gap == float("inf")


def test_the_bound_is_learned_once() -> None:
    bound = Bound(FP32, FP32)
    assert bound.value == 1e-2
    bound.learn(1e-3)
    assert bound.value == 4e-3
    bound.learn(5e-3)
    assert bound.value == 4e-3
    small = Bound(FP32, FP32)
    small.learn(1e-7)
    assert small.value == 1e-4
    for pair in ((FP32, BF16), (BF16, FP32), (BF16, BF16)):
        low = Bound(*pair)
        assert low.value == 0.25
        low.learn(0.0)
        assert low.value == 0.15


def test_a_canary_that_loses_a_completion_is_refused() -> None:
    engine = CopyEngine(policy_of("llama"))
    real = engine.results
    engine.results = lambda: (c for c in real() if c.request_id != 1)
    with pytest.raises(ValueError, match="1 of 6 test completions"):
        sample_canary(engine, canary_requests(VOCAB))


def test_requests_with_filters_are_held_to_what_their_noise_draws_behind_them() -> None:
    policy = policy_of("llama")
    canary = canary_of(policy)
    requests = tuple(replace(r, sampling=replace(r.sampling, top_k=4)) for r in canary.requests)
    plain = sample_canary(CopyEngine(policy), canary.requests)
    done = sample_canary(CopyEngine(policy), requests)
    assert any(
        one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(plain, done, strict=True)
    )
    whole = canary.view([(r, replace(c, kept=None)) for r, c in zip(requests, done, strict=True)])
    canary = replace(canary, requests=requests, view=lambda pairs: whole)
    found = Comparison(canary, [done]).of(done, has_keys=True, bound=1e-4)
    assert found.wrong_token == ""
    without = Comparison(replace(canary, requests=canary_requests(VOCAB)), [done])
    assert without.of(done, has_keys=True, bound=1e-4).wrong_token != ""
