"""Ratios of a token and of its sequence: values and gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.ratios import ratios, sequence_means, sequence_sums

# Sequence 0 has log ratios 0.1, 0.3 and 0.5, whose mean is 0.3; sequence 1 has -0.2 alone; 2 has no token.
SEQUENCE = torch.tensor([0, 0, 0, 1])
COUNT = torch.tensor([3, 1, 0])
OLD = torch.tensor([-1.0, -2.0, -3.0, -4.0])
LOG_RATIO = torch.tensor([0.1, 0.3, 0.5, -0.2])


def of(level: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratios, and the derivative (N, N) of each by each logprob."""
    leaf = (OLD + LOG_RATIO).requires_grad_()
    ratio_N = ratios(leaf, OLD, SEQUENCE, COUNT, level)
    rows = [torch.autograd.grad(r, leaf, retain_graph=True)[0] for r in ratio_N]
    return ratio_N.detach(), torch.stack(rows)


def test_of_a_token(assert_close_guarded):
    value, slope = of("token")
    expected = [math.exp(x) for x in (0.1, 0.3, 0.5, -0.2)]
    assert_close_guarded(value, expected, rtol=1e-6)
    assert_close_guarded(slope, torch.diag(torch.tensor(expected)), rtol=1e-6)


def test_of_a_sequence(assert_close_guarded):
    value, slope = of("sequence")
    s, t = math.exp(0.3), math.exp(-0.2)
    assert_close_guarded(value, [s, s, s, t], rtol=1e-6)
    # Each token moves the mean, and with it the ratio of all three, by a third.
    assert_close_guarded(slope, [[s / 3] * 3 + [0.0]] * 3 + [[0.0, 0.0, 0.0, t]], rtol=1e-6)


def test_of_a_sequence_by_tokens(assert_close_guarded):
    value, slope = of("sequence_token")
    s, t = math.exp(0.3), math.exp(-0.2)
    assert_close_guarded(value, [s, s, s, t], rtol=1e-6)
    assert_close_guarded(slope, torch.diag(torch.tensor([s, s, s, t])), rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_before_an_update_the_ratio_is_exactly_one(level):
    logprob = -5.0 * torch.rand(6, generator=torch.Generator().manual_seed(0))
    which, count = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([4, 2])
    assert torch.equal(ratios(logprob, logprob.clone(), which, count, level), torch.ones(6))


def test_sums_and_means(assert_close_guarded):
    value = torch.tensor([1.0, 2.0, 6.0, -4.0])
    assert_close_guarded(sequence_sums(value, SEQUENCE, 3), [9.0, -4.0, 0.0], rtol=1e-7)
    assert_close_guarded(sequence_means(value, SEQUENCE, COUNT), [3.0, -4.0, 0.0], rtol=1e-7)
