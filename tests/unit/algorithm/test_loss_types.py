"""What a token adds to the loss, family by family: hand-worked numbers, bounds, and what has no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.loss_types.cispo import cispo_objective
from covey.algorithm.loss_types.clipped import clipped_objective
from covey.algorithm.loss_types.fipo import fipo_weights, future_kl
from covey.algorithm.loss_types.registry import LOSSES
from covey.algorithm.loss_types.sapo import sapo_objective
from covey.algorithm.loss_types.vespo import vespo_weights
from covey.algorithm.losses import LossConfig, LossInputs, Terms
from covey.types import Denominators
from support.losses import slow_future_kl

LN2 = math.log(2.0)


def gradient(value_N: torch.Tensor, leaf_N: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value_N.sum(), leaf_N)[0]


# -- cispo -------------------------------------------------------------------------------------------------


def test_cispo_by_hand(assert_close_guarded):
    # Ratios 2, 6 and 6 with cap 5: weights 2, 5 and 5, whatever the sign of the advantage.
    logprob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old = logprob.detach() - torch.tensor([2.0, 6.0, 6.0]).log()
    advantage = torch.tensor([1.0, 1.0, -3.0])
    value = cispo_objective(torch.exp(logprob - old), advantage, logprob, 5.0)
    assert_close_guarded(value.detach(), [2.0, 10.0, -7.5], rtol=1e-6)
    # No token loses its gradient, also where a clipped loss would have none.
    assert_close_guarded(gradient(value, logprob), [-2.0, -5.0, 15.0], rtol=1e-6)
    clipped = clipped_objective(torch.exp(logprob - old), advantage, 0.2, 4.0, None)
    assert float(gradient(clipped, logprob)[1]) == 0.0


# -- sapo --------------------------------------------------------------------------------------------------


def test_sapo_by_hand(assert_close_guarded):
    # A = 2, tau 1, r = 1 + ln 3: sigmoid 3/4, so -2 x 3/4 x 4. A = -1, tau 2, r = 1: 1/2 x 4 / 2.
    ratio = torch.tensor([1.0 + math.log(3.0), 1.0], requires_grad=True)
    value = sapo_objective(ratio, torch.tensor([2.0, -1.0]), 1.0, 2.0)
    assert_close_guarded(value.detach(), [-6.0, 1.0], rtol=1e-6)
    # By r: -A 4 s (1 - s), that is -2 x 4 x 3/16, and 1 at r = 1.
    assert_close_guarded(gradient(value, ratio), [-1.5, 1.0], rtol=1e-6)


def test_sapo_at_ratio_one_is_the_plain_objective_and_fades_away_from_it():
    for tau in (0.5, 1.0, 4.0):
        ratio = torch.tensor([0.2, 0.6, 1.0, 1.4, 3.0], requires_grad=True)
        slope = gradient(sapo_objective(ratio, torch.ones(5), tau, tau), ratio)
        assert float(slope[2]) == pytest.approx(-1.0, rel=1e-6)
        assert slope.argmin() == 2
        assert bool((slope < 0).all())


# -- vespo -------------------------------------------------------------------------------------------------


def phi(log_ratio: list[float], advantage: float, k=(2.0, 3.0), rate=(3.0, 2.0)) -> torch.Tensor:
    num = len(log_ratio)
    values, which = torch.tensor(log_ratio), torch.zeros(num, dtype=torch.long)
    return vespo_weights(values, torch.full((num,), advantage), which, 1, k, rate)


def test_vespo_by_hand(assert_close_guarded):
    # The ratios 4 and 1/2 of one sequence have the product 2: 2^2 e^(3 (1 - 2)) and 2^3 e^(2 (1 - 2)).
    log_ratio = [2 * LN2, -LN2]
    assert_close_guarded(phi(log_ratio, 1.0), [4 * math.exp(-3)] * 2, rtol=1e-6)
    assert_close_guarded(phi(log_ratio, -1.0), [8 * math.exp(-2)] * 2, rtol=1e-6)
    # An advantage of 0 counts as a good one.
    assert_close_guarded(phi(log_ratio, 0.0), [4 * math.exp(-3)] * 2, rtol=1e-6)


def test_vespo_is_one_at_one_and_largest_at_k_over_lambda():
    assert float(phi([0.0], 1.0)) == 1.0
    logs = torch.linspace(-2, 2, 401)
    values = torch.stack([phi([float(x)], 1.0)[0] for x in logs])
    assert float(logs[values.argmax()].exp()) == pytest.approx(2.0 / 3.0, rel=0.01)


def test_vespo_is_finite_however_far_a_sequence_has_moved():
    for log_ratio in ([30.0] * 50, [-30.0] * 50, [1e4], [-1e4]):
        for advantage in (1.0, -1.0):
            weight = phi(log_ratio, advantage)
            assert weight.isfinite().all()
            assert float(weight.max()) < 1e-6


def test_vespo_of_several_sequences_mixes_nothing(assert_close_guarded):
    which = torch.tensor([0, 1, 0, 1])
    log_ratio = torch.tensor([0.1, -0.3, 0.2, -0.4])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    both = vespo_weights(log_ratio, advantage, which, 2, (2.0, 3.0), (3.0, 2.0))
    assert_close_guarded(both[[0, 2]], phi([0.1, 0.2], 1.0), rtol=1e-6)
    assert_close_guarded(both[[1, 3]], phi([-0.3, -0.4], -1.0), rtol=1e-6)


# -- fipo --------------------------------------------------------------------------------------------------


def test_future_kl_by_hand(assert_close_guarded):
    # Half-life 1: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4; the next sequence is on its own.
    log_ratio, which = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 0, 1])
    found = future_kl(log_ratio, which, torch.tensor([3, 1]), 1.0)
    assert_close_guarded(found, [3.0, 4.0, 4.0, 8.0], rtol=1e-6)


@pytest.mark.parametrize("half_life", [1.0, 2.0, 32.0, 1000.0])
def test_a_later_token_counts_half_after_the_half_life(half_life, assert_close_guarded):
    length = 2 * int(half_life) + 1
    log_ratio = torch.zeros(length)
    log_ratio[-1] = 1.0
    found = future_kl(log_ratio, torch.zeros(length, dtype=torch.long), torch.tensor([length]), half_life)
    middle, first = length - 1 - int(half_life), 0
    assert_close_guarded(found[[-1, middle, first]], [1.0, 0.5, 0.25], rtol=1e-5)


@pytest.mark.parametrize("lengths", [[255], [256], [257], [512, 1, 513], [3, 700, 256, 40]], ids=str)
@pytest.mark.parametrize("half_life", [4.0, 300.0])
def test_future_kl_against_the_double_loop_across_blocks(lengths, half_life, assert_close_guarded):
    total = sum(lengths)
    log_ratio = 0.1 * torch.randn(total, generator=torch.Generator().manual_seed(total))
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    found = future_kl(log_ratio, which, torch.tensor(lengths), half_life)
    values, places = log_ratio.double().tolist(), range(0, total, 7)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    owns = [range(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    expected = [slow_future_kl(n, owns[int(which[n])], values, half_life) for n in places]
    assert_close_guarded(found[list(places)], expected, rtol=2e-5)


def weights(future: list[float], ratio: list[float], advantage: list[float], **changes: object):
    options = {"clip_range": 0.2, "clip_high_only": True, "safety_threshold": None, **changes}
    return fipo_weights(torch.tensor(future), torch.tensor(ratio), torch.tensor(advantage), **options)


def test_bounds_of_fipos_weight_by_hand(assert_close_guarded):
    future, ones = [0.1, 1.0, -1.0], [1.0] * 3
    grown = math.exp(0.1)
    assert_close_guarded(weights(future, ones, ones)[0], [grown, 1.2, 1.0], rtol=1e-6)
    both = weights(future, ones, ones, clip_high_only=False)[0]
    assert_close_guarded(both, [grown, 1.2, 0.8], rtol=1e-6)
    free = weights(future, ones, ones, clip_range=0.0)[0]
    assert_close_guarded(free, [grown, math.e, 1 / math.e], rtol=1e-6)


def test_safety_of_fipos_weight_by_hand(assert_close_guarded):
    # Held back are bad tokens above the threshold alone: the third, and the fourth from below.
    future, ratio = [1.0, 1.0, 1.0, -1.0], [5.0, 4.0, 5.0, 5.0]
    advantage = [1.0, -1.0, -1.0, -1.0]
    weight, is_safe = weights(future, ratio, advantage, clip_range=0.0, safety_threshold=4.0)
    assert_close_guarded(weight, [math.e, math.e, 1.0, 0.8], rtol=1e-6)
    assert is_safe.tolist() == [True, True, False, False]
    free, all_safe = weights(future, ratio, advantage, clip_range=0.0)
    assert_close_guarded(free, [math.e, math.e, math.e, 1 / math.e], rtol=1e-6)
    assert all_safe.all()


def test_weights_have_no_gradient():
    leaf = torch.tensor([0.1, 0.2], requires_grad=True)
    which, ones = torch.tensor([0, 0]), torch.ones(2)
    assert not vespo_weights(leaf, ones, which, 1, (2.0, 3.0), (3.0, 2.0)).requires_grad
    future = future_kl(leaf, which, torch.tensor([2]), 2.0)
    assert not fipo_weights(future, ones, ones, 0.2, True, None)[0].requires_grad


# -- what losses declare -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_derivative_at_a_ratio_of_1_are_those_that_a_loss_declares(name, assert_close_guarded):
    loss, counts = LOSSES[name], torch.tensor([2, 1])
    logprob_N = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    inputs = LossInputs(
        logprob_N=logprob_N,
        old_logprob_N=logprob_N.detach(),
        ref_logprob_N=None,
        advantage_N=torch.tensor([1.5, 1.5, -0.5]),
        sequence_N=torch.tensor([0, 0, 1]),
        trained_count_S=counts,
        episode_count_S=counts,
        denominators=Denominators(num_episodes=2, num_tokens=3, max_completion_length=4),
    )
    if loss.term is None:
        assert loss.value_at_1 is loss.derivative_at_1 is None
        return
    terms = Terms(
        inputs=inputs,
        config=LossConfig(loss_type=name, epsilon=0.2, epsilon_high=loss.cap or 0.28),
        old_N=logprob_N.detach(),
        ratio_N=torch.exp(logprob_N - logprob_N.detach()),
        weight_N=None,
        sums={},
    )
    term_N = loss.term(terms)
    if loss.value_at_1 is not None:
        assert_close_guarded(term_N.detach(), loss.value_at_1 * inputs.advantage_N, rtol=1e-6)
    assert_close_guarded(gradient(term_N, logprob_N), loss.derivative_at_1 * inputs.advantage_N, rtol=1e-6)
