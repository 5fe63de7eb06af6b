"""Losses of the clipped kind: hand-worked numbers, on-policy steps, and the estimate k3 of the KL divergence.

Every loss is held to a loop of Python floats in test_losses_more.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from covey.algorithm.kl import k3
from covey.algorithm.loss_types.clipped import clipped_objective
from covey.algorithm.losses import LossConfig, LossInputs, policy_loss, token_weights
from covey.types import Denominators

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
LN2 = math.log(2.0)


# -- hand-worked -------------------------------------------------------------------------------------------
#
# Three sequences of 1, 2 and 1 loss tokens in this micro-batch; the step has 4 sequences (one of them
# elsewhere), 8 loss tokens and max_completion_length 5.
#
#   token  sequence  A     r     min(r A, clip(r, 0.8, 1.28) A)        loss      with delta 2
#   0      0         1     1.5   min(1.5, 1.28)   = 1.28               -1.28     -1.28
#   1      1         -2    0.5   min(-1, -1.6)    = -1.6               1.6       1.6
#   2      1         -2    3     min(-6, -2.56)   = -6                 6         min(-4, -2.56): 4
#   3      2         0.5   0.9   min(0.45, 0.45)  = 0.45               -0.45     -0.45
#
# Sum 5.87, with delta 3.87. grpo: (-1.28 + (1.6 + 6) / 2 - 0.45) / 4 = 2.07 / 4; with delta 1.07 / 4.

RATIO = (1.5, 0.5, 3.0, 0.9)
OLD = (-1.0, -2.0, -0.5, -3.0)
KL_GAP = (0.0, LN2, -LN2, 0.0)  # reference less policy


def hand_inputs(*, reference: bool = False) -> LossInputs:
    logprob = torch.tensor(
        [old + math.log(r) for old, r in zip(OLD, RATIO, strict=True)], dtype=torch.float64
    )
    gap = torch.tensor(KL_GAP, dtype=torch.float64)
    return LossInputs(
        logprob_N=logprob.float().requires_grad_(),
        old_logprob_N=torch.tensor(OLD),
        ref_logprob_N=(logprob + gap).float() if reference else None,
        advantage_N=torch.tensor([1.0, -2.0, -2.0, 0.5]),
        sequence_N=torch.tensor([0, 1, 1, 2]),
        trained_count_S=torch.tensor([1, 2, 1]),
        episode_count_S=torch.tensor([1, 2, 1]),
        denominators=Denominators(num_episodes=4, num_tokens=8, max_completion_length=5),
    )


def hand_config(loss_type: str, **changes: object) -> LossConfig:
    return replace(LossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28), **changes)


@pytest.mark.parametrize(
    ("loss_type", "delta", "expected"),
    [
        ("grpo", None, 2.07 / 4),
        ("bnpo", None, 5.87 / 8),
        ("dapo", None, 5.87 / 8),
        ("dr_grpo", None, 5.87 / (4 * 5)),
        ("grpo", 2.0, 1.07 / 4),
        ("bnpo", 2.0, 3.87 / 8),
        ("dapo", 2.0, 3.87 / 8),
        ("dr_grpo", 2.0, 3.87 / (4 * 5)),
    ],
)
def test_hand_worked_loss(loss_type, delta, expected, assert_close_guarded):
    out = policy_loss(hand_inputs(), hand_config(loss_type, delta=delta))
    assert_close_guarded(out.loss.detach(), expected, rtol=1e-6)


def test_hand_worked_gradient(assert_close_guarded):
    # d loss / d logprob = -A r x weight where the ratio is the smaller branch, and 0 where the clip or
    # delta is.
    inputs = hand_inputs()
    policy_loss(inputs, hand_config("dapo")).loss.backward()
    assert_close_guarded(inputs.logprob_N.grad, [0.0, 0.0, 6.0 / 8, -0.45 / 8], rtol=1e-6)
    inputs = hand_inputs()
    policy_loss(inputs, hand_config("grpo", delta=2.0)).loss.backward()
    assert_close_guarded(inputs.logprob_N.grad, [0.0, 0.0, 0.0, -0.45 / 4], rtol=1e-6)


# k3 of a gap d is e^d - d - 1: 1 - ln 2 for ln 2, and ln 2 - 1/2 for -ln 2; their sum is 1/2. With bias
# correction each is multiplied by its ratio: (1 - ln 2) / 2 + 3 (ln 2 - 1/2) = 2.5 ln 2 - 1.
@pytest.mark.parametrize(("correction", "kl"), [(False, 0.5), (True, 2.5 * LN2 - 1.0)])
@pytest.mark.parametrize(
    ("loss_type", "base", "weight"),
    [
        ("grpo", 2.07 / 4, 1 / 8),  # both tokens are in the sequence of two: 1 / (4 x 2)
        ("bnpo", 5.87 / 8, 1 / 8),
        ("dapo", 5.87 / 8, 1 / 8),
        ("dr_grpo", 5.87 / 20, 1 / 20),
    ],
)
def test_hand_worked_kl(loss_type, base, weight, correction, kl, assert_close_guarded):
    config = hand_config(loss_type, beta=0.5, use_bias_correction_kl=correction)
    out = policy_loss(hand_inputs(reference=True), config)
    assert_close_guarded(out.loss.detach(), base + 0.5 * kl * weight, rtol=1e-6)
    # Alone, so that a wrong KL cannot hide behind the larger policy term.
    without = policy_loss(hand_inputs(), hand_config(loss_type)).loss
    assert_close_guarded((out.loss - without).detach(), 0.5 * kl * weight, rtol=1e-5)
    assert_close_guarded(out.sums["kl"], 0.5, rtol=1e-6)


def test_clip_sums_count_the_tokens_whose_gradient_is_removed():
    sums = policy_loss(hand_inputs(), hand_config("dapo")).sums
    # Token 0 is above with A > 0, token 1 below with A < 0; token 2 is above with A < 0 and keeps its
    # gradient.
    assert {k: float(v) for k, v in sums.items()} == {
        "clip_ratio/low_mean": 1.0,
        "clip_ratio/high_mean": 1.0,
        "clip_ratio/region_mean": 2.0,
    }


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "expected"),
    [
        (0.79, 1.0, None, -0.79),  # below with A > 0: the ratio is the smaller branch
        (0.79, -1.0, None, 0.8),
        (1.29, 1.0, None, -1.28),
        (1.29, -1.0, None, 1.29),
        (50.0, -1.0, 4.0, 4.0),
        (50.0, 1.0, 4.0, -1.28),  # delta bounds only what the clip leaves unbounded
        (1.1, 3.0, 4.0, -3.3),
    ],
)
def test_clipping_of_one_token(ratio, advantage, delta, expected, assert_close_guarded):
    value = clipped_objective(torch.tensor([ratio]), torch.tensor([advantage]), 0.2, 0.28, delta)
    assert_close_guarded(value, [expected], rtol=1e-6)


def test_the_weights_of_a_step_sum_to_one():
    # grpo: over 4 sequences of which one is elsewhere, 3/4 is here; dapo: 4 of 8 tokens; dr_grpo: 4 of 4 x 5.
    shares = {t: float(token_weights(hand_inputs(), t).sum()) for t in LOSS_TYPES}
    assert shares == pytest.approx({"grpo": 0.75, "bnpo": 0.5, "dapo": 0.5, "dr_grpo": 0.2}, rel=1e-6)


# -- on-policy ---------------------------------------------------------------------------------------------


def test_without_old_logprobs_the_ratio_is_exactly_one():
    inputs = replace(hand_inputs(), old_logprob_N=None)
    # Clipping to nothing around 1 changes nothing, and every sum of clipped tokens is 0.
    config = hand_config("dapo", epsilon=0.0, epsilon_high=0.0, delta=1.0)
    out = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprob_N)
    assert float(out.loss.detach()) == float((-inputs.advantage_N / 8).sum())
    assert [float(v) for v in out.sums.values()] == [0.0, 0.0, 0.0]
    wide = policy_loss(inputs, hand_config("dapo"))
    (wide_gradient,) = torch.autograd.grad(wide.loss, inputs.logprob_N)
    assert torch.equal(wide_gradient, -inputs.advantage_N / 8)
    assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("delta", [None, 0.5, 1.0, 2.0])
def test_old_logprobs_equal_to_the_policys_change_nothing(delta):
    inputs = replace(hand_inputs(), old_logprob_N=None)
    same = replace(inputs, old_logprob_N=inputs.logprob_N.detach().clone())
    one, two = (policy_loss(i, hand_config("grpo", delta=delta)) for i in (inputs, same))
    assert torch.equal(one.loss, two.loss) and one.sums == two.sums
    assert torch.equal(*(torch.autograd.grad(x.loss, inputs.logprob_N)[0] for x in (one, two)))


# -- k3 ----------------------------------------------------------------------------------------------------


def test_k3_is_exactly_zero_without_a_gap():
    logprob = -20.0 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert k3(logprob, logprob.clone()).count_nonzero() == 0


def test_k3_is_not_negative():
    generator = torch.Generator().manual_seed(1)
    policy = -5.0 * torch.rand(100_000, generator=generator)
    for scale in (0.01, 0.1, 1.0, 5.0):
        value = k3(policy, policy + scale * torch.randn(policy.shape, generator=generator))
        assert float(value.min()) >= 0.0
        assert float(value.max()) > 0.0


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-4, 1e-3])
def test_the_mean_of_k3_is_not_below_zero_for_small_gaps(scale):
    generator = torch.Generator().manual_seed(2)
    policy = -3.0 * torch.rand(200_000, generator=generator)
    reference = policy + scale * torch.randn(policy.shape, generator=generator)
    gap = (reference - policy).double()
    exact = float((torch.expm1(gap) - gap).mean())
    mean = float(k3(policy, reference).double().mean())
    assert mean >= 0.0
    assert mean == pytest.approx(exact, rel=0.05)


def test_the_textbook_form_of_k3_would_fail_that():
    generator = torch.Generator().manual_seed(2)
    gap = 1e-5 * torch.randn(200_000, generator=generator)
    exact = float((torch.expm1(gap.double()) - gap.double()).mean())
    textbook = float((torch.exp(gap) - gap - 1.0).double().mean())
    assert textbook != pytest.approx(exact, rel=0.05)


# -- degenerate --------------------------------------------------------------------------------------------


def test_the_kl_term_reaches_rows_without_advantage():
    inputs = replace(hand_inputs(reference=True), advantage_N=torch.zeros(4))
    policy_loss(inputs, hand_config("dapo", beta=0.1, use_bias_correction_kl=False)).loss.backward()
    assert inputs.logprob_N.grad[[1, 2]].count_nonzero() == 2


def test_what_the_loss_refuses():
    with pytest.raises(AssertionError, match="float32"):
        policy_loss(
            replace(hand_inputs(), logprob_N=torch.zeros(4, dtype=torch.float64)), hand_config("dapo")
        )
    with pytest.raises(AssertionError, match="reference"):
        policy_loss(hand_inputs(), hand_config("dapo", beta=0.1))
