"""The head in C against the one in torch and a plain log_softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from covey.models import head_native
from covey.models.head import token_stats
from covey.models.head_blocks import HeadSpec
from covey.models.native.library import open_library

T, D = 21, 64
# What each token is predicted from: some from one context; context 4 predicts nothing, and 2 and 7 are the
# same token of the stream.
CONTEXT_N = torch.tensor([0, 1, 0, 2, 3, 3, 5, 6, 0, 7, 8, 6, 2])
CONTEXT_U = torch.tensor([0, 3, 4, 7, 8, 9, 12, 4, 20])


def library():
    found = open_library()
    assert found is not None, "these tests need a C compiler"
    return found


def made(vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    temperature_U = 0.5 + torch.rand(len(CONTEXT_U), generator=g)
    return {
        "hidden": torch.randn(T, D, generator=g).requires_grad_(),
        "weight": torch.randn(vocab, D, generator=g).requires_grad_(),
        "target": torch.randint(vocab, (len(CONTEXT_N),), generator=g),
        "temperature": temperature_U[CONTEXT_N],
    }


def in_c(x, **changes):
    x = {**x, **changes}
    return head_native.Stats.apply(
        *(library(), False, x["hidden"], x["weight"], CONTEXT_U, CONTEXT_N, x["target"], x["temperature"])
    )


def in_torch(x):
    taken = x["hidden"].index_select(0, CONTEXT_U)
    return token_stats(taken, x["weight"], None, CONTEXT_N, x["target"], x["temperature"], HeadSpec())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [32, 320, 1024])
def test_values_and_gradients(vocab, threads, assert_close_guarded):
    x = made(vocab)
    leaves = [x["hidden"], x["weight"]]
    slow = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = slow[0][CONTEXT_U[CONTEXT_N]] @ slow[1].t() / x["temperature"].double()[:, None]
    logprobs = logits.log_softmax(-1)
    expected = logprobs[torch.arange(len(CONTEXT_N)), x["target"]], -(logprobs.exp() * logprobs).sum(-1)
    g = torch.Generator().manual_seed(9)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Only logprobs, only entropy, both: a loss may use either.
        for used in ((1, 0), (0, 1), (1, 1)):
            weights = torch.randn(2, len(CONTEXT_N), generator=g) * torch.tensor(used)[:, None]
            for way in (in_c, in_torch):
                got = way(x)
                for actual, due in zip(got, expected, strict=True):
                    assert_close_guarded(actual.detach(), due.detach(), rtol=2e-6)
                loss = sum((w * part).sum() for w, part, on in zip(weights, got, used, strict=True) if on)
                due_loss = sum((w.double() * part).sum() for w, part in zip(weights, expected, strict=True))
                due_gradients = torch.autograd.grad(due_loss, slow, retain_graph=True)
                for actual, due in zip(torch.autograd.grad(loss, leaves), due_gradients, strict=True):
                    assert_close_guarded(actual, due, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_by_hand(assert_close_guarded):
    # Two logits, ln 3 and 0, stand out over 30 that are far below: probabilities 3/4 and 1/4, entropy
    # 2 ln 2 - (3/4) ln 3. At temperature 1/2 the logits double: probabilities 9/10 and 1/10, entropy
    # ln 10 - 0.9 ln 9.
    hidden, weight = torch.zeros(2, 32), torch.zeros(32, 32)
    hidden[:, 0] = 1.0
    weight[:, 0] = -1000.0
    weight[0, 0], weight[1, 0] = math.log(3), 0.0
    two = torch.arange(2)
    logprob, entropy = head_native.Stats.apply(
        library(), False, hidden, weight, two, two, torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    )
    assert_close_guarded(logprob, [math.log(0.75), math.log(0.1)], rtol=1e-6)
    expected = [2 * math.log(2) - 0.75 * math.log(3), math.log(10) - 0.9 * math.log(9)]
    assert_close_guarded(entropy, expected, rtol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    x, gradients = made(64), []
    for is_frozen in (False, True):
        weight = x["weight"].detach().requires_grad_(not is_frozen)
        logprob, entropy = in_c(x, weight=weight)
        (gradient,) = torch.autograd.grad(logprob.sum() + entropy.sum(), x["hidden"], retain_graph=True)
        logprob.sum().backward()
        assert (weight.grad is None) == is_frozen
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_no_tokens_give_no_values_but_a_gradient():
    x, nothing = made(64), torch.zeros(0, dtype=torch.long)
    logprob, entropy = head_native.Stats.apply(
        library(), False, x["hidden"], x["weight"], nothing, nothing, nothing, torch.zeros(0)
    )
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,)
    assert x["weight"].grad.count_nonzero() == x["hidden"].grad.count_nonzero() == 0


@pytest.mark.parametrize("target", [-1, 64])
def test_a_target_that_does_not_exist(target):
    x = made(64)
    with pytest.raises(IndexError, match="does not exist"):
        in_c(x, target=x["target"].index_fill(0, torch.tensor([5]), target))


def test_what_is_no_number_shows():
    x = made(64)
    for name in ("hidden", "weight"):
        broken = x[name].detach().clone()
        broken[7, -1] = torch.nan
        logprob, entropy = in_c(x, **{name: broken})
        assert bool(logprob.isnan().any()) and bool(entropy.isnan().any())


def test_what_it_serves():
    weight, found = torch.zeros(320, 64), library()
    assert head_native.serves(found, weight, None, HeadSpec(), 100)
    assert not head_native.serves(found, weight, torch.zeros(320), HeadSpec(), 100)
    assert not head_native.serves(found, weight, None, HeadSpec(scale=2.0), 100)
    assert not head_native.serves(found, weight, None, HeadSpec(softcap=2.0), 100)
    assert not head_native.serves(found, weight.bfloat16(), None, HeadSpec(), 100)
    assert not head_native.serves(found, torch.zeros(321, 64), None, HeadSpec(), 100)
    assert not head_native.serves(found, torch.zeros(64, 320).t(), None, HeadSpec(), 100)
    # More contexts than a block of logits holds.
    assert not head_native.serves(found, weight, None, HeadSpec(), (1 << 21) // 320 + 1)
