"""Estimates of the KL divergence: by hand, what they are on average, and what their gradients are."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.kl import ESTIMATORS, k1, k2

LN2 = math.log(2.0)
# Two distributions over three words.
POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_by_hand(assert_close_guarded):
    # The policy is twice, half and once as sure as the reference.
    policy = torch.tensor([-1.0, -1.0, -1.0])
    reference = policy + torch.tensor([-LN2, LN2, 0.0])
    assert_close_guarded(k1(policy, reference), [LN2, -LN2, 0.0], rtol=1e-6)
    assert_close_guarded(k2(policy, reference), [LN2**2 / 2, LN2**2 / 2, 0.0], rtol=1e-6)
    assert_close_guarded(ESTIMATORS["k3"](policy, reference), [LN2 - 0.5, 1 - LN2, 0.0], rtol=1e-6)


def test_slopes_by_hand(assert_close_guarded):
    # By the policy's logprob, with d = reference - policy: 1, -d and 1 - exp(d).
    for name, expected in (("k1", [1.0, 1.0]), ("k2", [LN2, -LN2]), ("k3", [0.5, -1.0])):
        policy = torch.tensor([-1.0, -1.0], requires_grad=True)
        reference = torch.tensor([-1.0 - LN2, -1.0 + LN2])
        ESTIMATORS[name](policy, reference).sum().backward()
        assert_close_guarded(policy.grad, expected, rtol=1e-6)


def expectation(name: str) -> float:
    """The mean of an estimate over what the policy draws."""
    return float((POLICY * ESTIMATORS[name](POLICY.log(), REFERENCE.log())).sum())


def test_k1_and_k3_are_unbiased_and_k2_is_not(assert_close_guarded):
    divergence = float((POLICY * (POLICY / REFERENCE).log()).sum())
    assert_close_guarded(expectation("k1"), divergence, rtol=1e-12)
    assert_close_guarded(expectation("k3"), divergence, rtol=1e-12)
    assert expectation("k2") != pytest.approx(divergence, rel=0.01)
    assert expectation("k2") == pytest.approx(divergence, rel=0.5)


def mean_gradient(name: str) -> torch.Tensor:
    """The mean over the policy's draws of the gradient by the logits that an estimate in a loss has."""
    logits = POLICY.log().requires_grad_()
    logprob = torch.log_softmax(logits, 0)
    (gradient,) = torch.autograd.grad((POLICY * ESTIMATORS[name](logprob, REFERENCE.log())).sum(), logits)
    return gradient


def test_what_holds_the_policy_back(assert_close_guarded):
    logits = POLICY.log().requires_grad_()
    logprob = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logprob.exp() * (logprob - REFERENCE.log())).sum(), logits)
    assert_close_guarded(mean_gradient("k2"), exact, rtol=1e-12)
    assert float(mean_gradient("k1").abs().max()) < 1e-12
    # That of k3 is of the divergence the other way round, KL(reference || policy): policy - reference.
    assert_close_guarded(mean_gradient("k3"), POLICY - REFERENCE, rtol=1e-12)
    assert float((mean_gradient("k3") * exact).sum()) > 0
