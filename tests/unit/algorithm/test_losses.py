"""Losses: hand-worked numbers, a float64 loop as oracle, gradients, and invariance under cutting the step.

What is proved: value and gradient of every `loss_type` with every combination of clipping, `delta` and k3
term, in float32 against float64. What is not: that a whole training step agrees, which the packing and
learner tests say.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from covey.algorithm.kl import k3
from covey.algorithm.losses import LossConfig, LossInputs, policy_loss, token_weights
from covey.algorithm.objectives import clipped_objective
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
        denominators=Denominators(num_sequences=4, num_tokens=8, max_completion_length=5),
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


# -- a loop in float64 as oracle ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    inputs: LossInputs
    config: LossConfig


def oracle(inputs: LossInputs, config: LossConfig, logprob: torch.Tensor) -> torch.Tensor:
    """The definition, token by token, in float64; differentiable in `logprob`."""
    d = inputs.denominators
    total = 0.0 * logprob.sum()
    for n in range(logprob.shape[0]):
        a = float(inputs.advantage_N[n])
        old = logprob[n].detach() if inputs.old_logprob_N is None else inputs.old_logprob_N[n].double()
        r = torch.exp(logprob[n] - old)
        value = float(r.detach())
        low, high = 1.0 - config.epsilon, 1.0 + config.epsilon_high
        is_bounded = config.delta is not None and value > config.delta
        one, one_value = (config.delta, config.delta) if is_bounded else (r, value)
        clipped = min(max(value, low), high)
        two, two_value = (r, value) if clipped == value else (clipped, clipped)
        token = -(one * a if one_value * a <= two_value * a else two * a)
        if config.beta:
            gap = inputs.ref_logprob_N[n].double() - logprob[n]
            kl = torch.exp(gap) - gap - 1.0
            token = token + config.beta * (kl * r if config.use_bias_correction_kl else kl)
        match config.loss_type:
            case "grpo":
                divisor = d.num_sequences * int(inputs.trained_count_S[int(inputs.sequence_N[n])])
            case "dr_grpo":
                divisor = d.num_sequences * d.max_completion_length
            case _:
                divisor = d.num_tokens
        total = total + token / divisor
    return total


def random_case(loss_type: str, seed: int) -> Case:
    rng = random.Random(f"{loss_type}/{seed}")
    generator = torch.Generator().manual_seed(seed)
    counts = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    num = sum(counts)
    logprob = -3.0 * torch.rand(num, generator=generator)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    advantage_S = torch.randn(len(counts), generator=generator)
    beta = rng.choice([0.0, 0.04, 1.0])
    inputs = LossInputs(
        logprob_N=logprob.requires_grad_(),
        old_logprob_N=rng.choice(
            [None, logprob.detach() + rng.choice([0.05, 1.0]) * torch.randn(num, generator=generator)]
        ),
        ref_logprob_N=logprob.detach() + torch.randn(num, generator=generator) if beta else None,
        advantage_N=advantage_S[sequence],
        sequence_N=sequence,
        trained_count_S=torch.tensor(counts),
        denominators=Denominators(
            num_sequences=len(counts) + rng.randint(0, 3),
            num_tokens=num + rng.randint(0, 9),
            max_completion_length=rng.randint(6, 20),
        ),
    )
    config = LossConfig(
        loss_type=loss_type,
        epsilon=rng.choice([0.1, 0.2]),
        epsilon_high=rng.choice([0.2, 0.28]),
        delta=rng.choice([None, 1.5, 4.0]),
        beta=beta,
        use_bias_correction_kl=rng.random() < 0.5,
    )
    return Case(inputs, config)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_against_the_loop(loss_type, assert_close_guarded):
    for seed in range(25):
        case = random_case(loss_type, seed)
        slow = case.inputs.logprob_N.detach().double().requires_grad_()
        expected = oracle(case.inputs, case.config, slow)
        (expected_gradient,) = torch.autograd.grad(expected, slow)
        out = policy_loss(case.inputs, case.config)
        (gradient,) = torch.autograd.grad(out.loss, case.inputs.logprob_N)
        assert_close_guarded(out.loss.detach(), expected.detach(), rtol=1e-5)
        assert_close_guarded(gradient, expected_gradient, rtol=1e-5)


def test_the_oracles_own_gradient_is_the_slope(assert_close_guarded):
    step = 1e-6
    for loss_type, seed in itertools.product(LOSS_TYPES, range(3)):
        case = random_case(loss_type, seed)
        # With no old logprobs the ratio's denominator is the policy itself, held still: pin it for the
        # difference.
        start = case.inputs.logprob_N.detach().double()
        old = start if case.inputs.old_logprob_N is None else case.inputs.old_logprob_N
        inputs = replace(case.inputs, old_logprob_N=old)
        slow = start.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(oracle(inputs, case.config, slow), slow)
        slope = torch.empty_like(start)
        for n in range(len(start)):
            shift = torch.zeros_like(start)
            shift[n] = step
            ahead, behind = (oracle(inputs, case.config, start + s * shift) for s in (1, -1))
            slope[n] = (ahead - behind) / (2 * step)
        assert_close_guarded(gradient, slope, rtol=1e-6)


# -- invariances -------------------------------------------------------------------------------------------


def micro_of(inputs: LossInputs, sequences: list[int], leaf: torch.Tensor) -> LossInputs:
    """The micro-batch that holds `sequences` of a step, numbered from 0 as packing does."""
    chosen = torch.isin(inputs.sequence_N, torch.tensor(sequences, dtype=torch.long))
    number = {s: i for i, s in enumerate(sequences)}

    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[chosen]

    return replace(
        inputs,
        logprob_N=leaf[chosen],
        old_logprob_N=cut(inputs.old_logprob_N),
        ref_logprob_N=cut(inputs.ref_logprob_N),
        advantage_N=inputs.advantage_N[chosen],
        sequence_N=torch.tensor([number[int(s)] for s in inputs.sequence_N[chosen]], dtype=torch.long),
        trained_count_S=inputs.trained_count_S[sequences],
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_sum_over_micro_batches_is_the_whole_loss(loss_type, assert_close_guarded):
    rng = random.Random(1)
    for seed in range(25):
        case = random_case(loss_type, seed)
        leaf = case.inputs.logprob_N
        sequences = list(range(len(case.inputs.trained_count_S)))
        rng.shuffle(sequences)
        cuts = sorted(rng.choices(range(len(sequences) + 1), k=2))  # equal cuts leave an empty micro-batch
        parts = [sequences[: cuts[0]], sequences[cuts[0] : cuts[1]], sequences[cuts[1] :]]
        losses = [policy_loss(micro_of(case.inputs, p, leaf), case.config) for p in parts]
        (cut_gradient,) = torch.autograd.grad(sum(out.loss for out in losses), leaf)
        whole = policy_loss(case.inputs, case.config)
        (gradient,) = torch.autograd.grad(whole.loss, leaf)
        assert_close_guarded(
            sum(out.loss.detach().double() for out in losses), whole.loss.detach(), rtol=1e-5
        )
        assert_close_guarded(cut_gradient, gradient, rtol=1e-6)
        for name, value in whole.sums.items():
            assert_close_guarded(sum(out.sums[name] for out in losses), value, rtol=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_micro_batch_is_a_zero_with_a_gradient(loss_type):
    leaf = torch.zeros(0, requires_grad=True)
    inputs = replace(
        hand_inputs(),
        logprob_N=leaf,
        old_logprob_N=torch.zeros(0),
        advantage_N=torch.zeros(0),
        sequence_N=torch.zeros(0, dtype=torch.long),
        trained_count_S=torch.tensor([0]),
    )
    loss = policy_loss(inputs, hand_config(loss_type)).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert leaf.grad is not None


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


def test_k3_by_hand(assert_close_guarded):
    policy = torch.tensor([-1.0, -1.0, -1.0])
    reference = policy + torch.tensor([LN2, -LN2, 0.0])
    assert_close_guarded(k3(policy, reference), [1 - LN2, LN2 - 0.5, 0.0], rtol=1e-6)


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


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_token(loss_type, assert_close_guarded):
    # One sequence of one token, A = 2, ratio 1: -2 times the weight, which is 1 but for dr_grpo's 1 / (1 x
    # 4).
    leaf = torch.tensor([-0.7], requires_grad=True)
    inputs = LossInputs(
        logprob_N=leaf,
        old_logprob_N=None,
        ref_logprob_N=None,
        advantage_N=torch.tensor([2.0]),
        sequence_N=torch.tensor([0]),
        trained_count_S=torch.tensor([1]),
        denominators=Denominators(num_sequences=1, num_tokens=1, max_completion_length=4),
    )
    loss = policy_loss(inputs, hand_config(loss_type)).loss
    loss.backward()
    expected = -0.5 if loss_type == "dr_grpo" else -2.0
    assert_close_guarded(loss.detach(), expected, rtol=1e-6)
    assert_close_guarded(leaf.grad, [expected], rtol=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_of_zero_give_an_exactly_zero_gradient(loss_type):
    inputs = hand_inputs()
    inputs = replace(inputs, advantage_N=torch.zeros(4))
    loss = policy_loss(inputs, hand_config(loss_type)).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert inputs.logprob_N.grad.count_nonzero() == 0


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
