"""Every loss at every level of the ratio, with masks, corrections, KL estimates and the entropy bonus.

What is proved: value and gradient in float32 against a loop of Python floats and its finite differences; that
the sum over micro-batches in any order is the whole; that degenerate steps give what they should. What is
not: that a whole training step agrees, which tests/invariance says. The loss `real` has tests of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
import torch

from covey.algorithm.correction import Correction, CorrectionMode
from covey.algorithm.losses import LossConfig, LossInputs, LossType, policy_loss
from covey.algorithm.ratios import Level
from covey.types import Denominators
from support.losses import micro_of, random_step, slow_value_and_slopes

LOSS_TYPES = tuple(name for name in get_args(LossType) if name != "real")
LEVELS = get_args(Level)
BASE = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)

ADDED = {
    "plain": {},
    "delta": {"delta": 1.5},
    "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k3": {"beta": 0.3, "kl_estimator": "k3"},
    "k3 without the ratio": {"beta": 0.3, "kl_estimator": "k3", "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.1},
    "off-policy mask": {"off_policy_delta": 0.1},
    "everything": {
        "beta": 0.2,
        "entropy_coef": 0.05,
        "off_policy_delta": 0.3,
        "correction": Correction(mode="token_truncate", threshold=1.3),
    },
}


def config_of(loss_type: str, **changes: object) -> LossConfig:
    if loss_type == "cispo":
        changes = {"epsilon_high": 1.4, **changes}
    return replace(BASE, loss_type=loss_type, **changes)


def assert_same_value(loss, value, slope, assert_close_guarded) -> None:
    """Terms may cancel: what is left is compared in units of what is added up, and alone where large."""
    size = float(slope.abs().sum()) + abs(float(value))
    assert abs(float(loss.detach()) - float(value)) <= 1e-5 * size
    if abs(float(value)) > 0.1 * size:
        assert_close_guarded(loss.detach(), value, rtol=1e-4)


def assert_is_the_loop(config: LossConfig, assert_close_guarded, seeds: range) -> None:
    moved = 0
    for seed in seeds:
        inputs = random_step(config, seed).inputs
        value, slope, entropy_slope = slow_value_and_slopes(inputs, config)
        out = policy_loss(inputs, config)
        gradient, entropy_gradient = torch.autograd.grad(
            out.loss, [inputs.logprob_N, inputs.entropy_N], allow_unused=True, materialize_grads=True
        )
        assert_same_value(out.loss, value, slope, assert_close_guarded)
        assert_close_guarded(gradient, slope, rtol=3e-5)
        assert_close_guarded(entropy_gradient, entropy_slope, rtol=3e-5)
        moved += bool(slope.count_nonzero())
    assert moved > len(seeds) / 3


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_against_the_loop(loss_type, level, added, assert_close_guarded):
    config = config_of(loss_type, importance_sampling_level=level, **ADDED[added])
    assert_is_the_loop(config, assert_close_guarded, range(4))


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("mode", get_args(CorrectionMode))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_corrections_against_the_loop(loss_type, mode, is_product, assert_close_guarded):
    rule = Correction(mode=mode, threshold=1.2, is_product=is_product, floor=0.6 if is_product else 0.0)
    assert_is_the_loop(config_of(loss_type, correction=rule), assert_close_guarded, range(8))


@pytest.mark.parametrize(
    "changes",
    [
        {"fipo_decay_rate": 2.0},
        {"fipo_clip_range": 0.0},
        {"fipo_clip_high_only": False},
        {"fipo_safety_threshold": None},
        {"fipo_safety_threshold": 1.1, "fipo_clip_range": 0.5},
    ],
    ids=str,
)
def test_options_of_fipo_against_the_loop(changes, assert_close_guarded):
    assert_is_the_loop(config_of("fipo", **changes), assert_close_guarded, range(15))


@pytest.mark.parametrize(
    ("loss_type", "changes"),
    [
        ("sapo", {"tau": (2.0, 0.5)}),
        ("vespo", {"vespo_k": (1.0, 2.0), "vespo_lambda": (0.5, 1.5)}),
        ("cispo", {"epsilon_high": 1.05}),
    ],
    ids=str,
)
def test_options_of_single_losses_against_the_loop(loss_type, changes, assert_close_guarded):
    assert_is_the_loop(config_of(loss_type, **changes), assert_close_guarded, range(15))


# -- invariances -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_sum_over_micro_batches_in_any_order_is_the_whole(loss_type, level, assert_close_guarded):
    rng = random.Random(f"{loss_type}/{level}")
    for seed, (name, added) in enumerate(sorted(ADDED.items())):
        config = config_of(loss_type, importance_sampling_level=level, **added)
        inputs = random_step(config, seed).inputs
        leaves = [inputs.logprob_N, inputs.entropy_N]
        sequences = list(range(len(inputs.trained_count_S)))
        rng.shuffle(sequences)
        first, second = sorted(rng.choices(range(len(sequences) + 1), k=2))
        parts = [sequences[:first], sequences[first:second], sequences[second:]]  # some of them empty
        outs = [policy_loss(micro_of(inputs, part), config) for part in parts]
        whole = policy_loss(inputs, config)
        kind = {"allow_unused": True, "materialize_grads": True}
        cut = torch.autograd.grad(sum(out.loss for out in outs), leaves, **kind)
        expected = torch.autograd.grad(whole.loss, leaves, **kind)
        total = sum(out.loss.detach().double() for out in outs)
        assert_same_value(total, whole.loss.detach(), expected[0], assert_close_guarded)
        for one, other in zip(cut, expected, strict=True):
            assert_close_guarded(one, other, rtol=1e-5)
        assert all(out.sums.keys() == whole.sums.keys() for out in outs), name
        for key, value in whole.sums.items():
            assert_close_guarded(sum(out.sums[key] for out in outs), value, rtol=1e-6)


# -- degenerate --------------------------------------------------------------------------------------------


def one_token(advantage: float, **changes: object) -> LossInputs:
    """One sequence of one token at logprob -0.5, alone in its step."""
    return replace(
        LossInputs(
            logprob_N=torch.tensor([-0.5], requires_grad=True),
            old_logprob_N=None,
            ref_logprob_N=None,
            advantage_N=torch.tensor([advantage]),
            sequence_N=torch.tensor([0]),
            trained_count_S=torch.tensor([1]),
            episode_count_S=torch.tensor([1]),
            denominators=Denominators(num_episodes=1, num_tokens=1, max_completion_length=4),
        ),
        **changes,
    )


# At ratio 1 every loss has the gradient -A of its token, times its weight. The value is -A for a loss of the
# ratio, -A log p = A / 2 for one of the logprob, and 4 / tau times the half of -A for sapo.
@pytest.mark.parametrize(
    ("loss_type", "value", "slope"),
    [
        *((name, -2.0, -2.0) for name in ("grpo", "bnpo", "dapo", "luspo", "fipo")),
        ("dr_grpo", -0.5, -0.5),
        ("cispo", 1.0, -2.0),
        ("vespo", 1.0, -2.0),
        ("sapo", -4.0, -2.0),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_one_token_at_ratio_one(loss_type, value, slope, level, assert_close_guarded):
    inputs = one_token(2.0)
    out = policy_loss(inputs, config_of(loss_type, importance_sampling_level=level))
    out.loss.backward()
    assert_close_guarded(out.loss.detach(), value, rtol=1e-6)
    assert_close_guarded(inputs.logprob_N.grad, [slope], rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_of_zero_give_an_exactly_zero_gradient(loss_type, level):
    config = config_of(loss_type, importance_sampling_level=level)
    inputs = random_step(config, 1).inputs
    inputs = replace(inputs, advantage_N=torch.zeros_like(inputs.advantage_N))
    loss = policy_loss(inputs, config).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
    assert float(loss.detach()) == 0.0
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_whose_tokens_are_all_masked_has_no_gradient(loss_type):
    config = config_of(loss_type)
    inputs = random_step(config, 2).inputs
    inputs = replace(inputs, keep_N=torch.zeros_like(inputs.advantage_N))
    loss = policy_loss(inputs, config).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
    assert float(loss.detach()) == 0.0
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_micro_batch_is_a_zero_with_a_gradient(loss_type):
    leaf, nothing = torch.zeros(0, requires_grad=True), torch.zeros(0)
    inputs = LossInputs(
        logprob_N=leaf,
        old_logprob_N=nothing,
        ref_logprob_N=nothing,
        advantage_N=nothing,
        sequence_N=torch.zeros(0, dtype=torch.long),
        trained_count_S=torch.tensor([0]),
        episode_count_S=torch.tensor([0]),
        denominators=Denominators(num_episodes=4, num_tokens=8, max_completion_length=5),
        sampler_logprob_N=nothing,
        entropy_N=nothing,
    )
    for level in LEVELS:
        loss = policy_loss(
            inputs, config_of(loss_type, importance_sampling_level=level, **ADDED["everything"])
        ).loss
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert leaf.grad is not None


def test_a_group_of_two_opposed_completions(assert_close_guarded):
    # Advantages 1 and -1, one token each, ratio 1: the gradients are opposed, and equal in size.
    inputs = one_token(
        1.0,
        logprob_N=torch.tensor([-0.5, -0.5], requires_grad=True),
        advantage_N=torch.tensor([1.0, -1.0]),
        sequence_N=torch.tensor([0, 1]),
        trained_count_S=torch.tensor([1, 1]),
        episode_count_S=torch.tensor([1, 1]),
        denominators=Denominators(num_episodes=2, num_tokens=2, max_completion_length=1),
    )
    for loss_type in LOSS_TYPES:
        loss = policy_loss(inputs, config_of(loss_type)).loss
        (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
        assert_close_guarded(gradient, [-0.5, 0.5], rtol=1e-6)


def test_what_is_missing_is_said():
    config = config_of("dapo")
    for changes, words in (
        ({"entropy_coef": 0.1}, "entropies"),
        ({"off_policy_delta": 0.1}, "sampler"),
        ({"correction": Correction(mode="token_mask", threshold=2.0)}, "sampler"),
        ({"loss_type": "real"}, "whole step"),
    ):
        with pytest.raises(AssertionError, match=words):
            policy_loss(one_token(1.0), replace(config, **changes))
