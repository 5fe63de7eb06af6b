"""The loss `real`: value and gradient against the formula of the whole step, also where groups are cut."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from covey.algorithm.contrast import contrast, contrast_sums
from covey.algorithm.losses import LossConfig, LossInputs, policy_loss
from covey.algorithm.ratios import sequence_means
from covey.types import Denominators
from support.losses import micro_of

CONFIG = LossConfig(loss_type="real", epsilon=0.2, epsilon_high=0.28)


def formula(score_S: torch.Tensor, advantage_S: torch.Tensor, group_S: torch.Tensor, num_groups: int):
    """log(1 + sum over the others of e^s) + log(1 + sum over the good of e^-s), a mean over the groups."""
    total = 0.0 * score_S.sum()
    for group in range(num_groups):
        good = score_S[(group_S == group) & (advantage_S > 0)]
        others = score_S[(group_S == group) & (advantage_S <= 0)]
        if len(good) and len(others):
            total = total + torch.log(1 + others.exp().sum()) + torch.log(1 + (-good).exp().sum())
    return total / num_groups


def step(counts: list[int], advantages: list[float], *, scale: float = 0.5, seed: int = 0) -> LossInputs:
    num = sum(counts)
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(num, generator=generator)
    which = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return LossInputs(
        logprob_N=(old + scale * torch.randn(num, generator=generator)).requires_grad_(),
        old_logprob_N=old,
        ref_logprob_N=None,
        advantage_N=torch.tensor(advantages)[which],
        sequence_N=which,
        trained_count_S=torch.tensor(counts),
        episode_count_S=torch.tensor(counts),
        denominators=Denominators(num_episodes=len(counts), num_tokens=num, max_completion_length=9),
    )


def loss_in_parts(
    inputs: LossInputs, groups: list[int], parts: list[list[int]], num_groups: int, tau: float
) -> torch.Tensor:
    """The sum over micro-batches, whose sums over groups are taken first, as the learner does."""
    group_S = torch.tensor(groups)
    gap_N = inputs.logprob_N.detach() - inputs.old_logprob_N
    score_S = sequence_means(gap_N, inputs.sequence_N, inputs.trained_count_S) / tau
    first_S = inputs.trained_count_S.cumsum(0) - inputs.trained_count_S
    advantage_S = inputs.advantage_N[first_S]
    rows = [(score_S[p], advantage_S[p], group_S[p]) for p in parts]
    sums_4P = sum(contrast_sums(*row, num_groups) for row in rows)
    total = torch.zeros(())
    for part, row in zip(parts, rows, strict=True):
        micro = replace(micro_of(inputs, part), contrast=contrast(*row, sums_4P, tau))
        total = total + policy_loss(micro, CONFIG).loss
    return total


def expected_of(inputs: LossInputs, groups: list[int], num_groups: int, tau: float):
    slow = inputs.logprob_N.detach().double().requires_grad_()
    gap_N = slow - inputs.old_logprob_N
    score_S = sequence_means(gap_N, inputs.sequence_N, inputs.trained_count_S) / tau
    first_S = inputs.trained_count_S.cumsum(0) - inputs.trained_count_S
    value = formula(score_S, inputs.advantage_N[first_S], torch.tensor(groups), num_groups)
    return value.detach(), torch.autograd.grad(value, slow)[0]


def test_by_hand(assert_close_guarded):
    # One group of four with one good completion, all scores 0: log(1 + 3) + log(1 + 1).
    inputs = step([1, 1, 1, 1], [3.0, -1.0, -1.0, -1.0], scale=0.0)
    loss = loss_in_parts(inputs, [0] * 4, [[0, 1, 2, 3]], 1, 0.5)
    assert_close_guarded(loss.detach(), math.log(8.0), rtol=1e-6)
    # By the mean log ratio: -1 / 2 for the good one, 1 / 4 for each other, over tau.
    (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
    assert_close_guarded(gradient, [-1.0, 0.5, 0.5, 0.5], rtol=1e-6)


def test_by_hand_away_from_the_start(assert_close_guarded):
    # Two tokens of the good one moved by ln 2 on average, over tau 1/2 a score of 2 ln 2; the other by 0:
    # log(1 + 1) + log(1 + 1/4), and slopes -(1/4) / (5/4) = -1/5 and 1/2, over tau and the tokens.
    inputs = step([2, 1], [1.0, -1.0], scale=0.0)
    moved = inputs.old_logprob_N + torch.tensor([0.5, 1.5, 0.0]) * math.log(2.0)
    inputs = replace(inputs, logprob_N=moved.requires_grad_())
    loss = loss_in_parts(inputs, [0, 0], [[0, 1]], 1, 0.5)
    assert_close_guarded(loss.detach(), math.log(2.5), rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
    assert_close_guarded(gradient, [-0.2, -0.2, 1.0], rtol=1e-6)


@pytest.mark.parametrize("tau", [0.2, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_against_the_formula_of_the_whole_step_however_it_is_cut(seed, tau, assert_close_guarded):
    rng = random.Random(seed)
    groups = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    counts = [rng.randint(1, 6) for _ in groups]
    advantages = [1.0, -0.5, -0.5, 0.0, 0.7, 0.2, -0.9, *(0.0 for _ in range(4))]
    inputs = step(counts, advantages, seed=seed)
    value, slope = expected_of(inputs, groups, 3, tau)
    everything = list(range(len(groups)))
    rng.shuffle(everything)
    # As one, row by row, cut through the groups, and with an empty micro-batch.
    for parts in (
        [everything],
        [[s] for s in everything],
        [everything[:2], everything[2:5], everything[5:]],
        [everything, []],
    ):
        loss = loss_in_parts(inputs, groups, parts, 3, tau)
        (gradient,) = torch.autograd.grad(loss, inputs.logprob_N)
        assert_close_guarded(loss.detach(), value, rtol=1e-5)
        assert_close_guarded(gradient, slope, rtol=1e-5)


def test_a_group_without_a_contrast_has_no_loss_and_counts_in_the_mean(assert_close_guarded):
    inputs = step([1, 1, 2, 2], [1.0, -1.0, 0.0, 0.0])
    both = loss_in_parts(inputs, [0, 0, 1, 1], [[0, 1, 2, 3]], 2, 0.5)
    (gradient,) = torch.autograd.grad(both, inputs.logprob_N)
    assert gradient[2:].count_nonzero() == 0
    alone = loss_in_parts(inputs, [0, 0, 1, 1], [[0, 1]], 1, 0.5)
    assert_close_guarded(both.detach(), alone.detach() / 2, rtol=1e-6)


def test_all_good_and_all_bad_groups_have_none():
    for advantages in ([1.0, 1.0], [-1.0, 0.0]):
        inputs = step([2, 2], advantages)
        loss = loss_in_parts(inputs, [0, 0], [[0, 1]], 1, 0.5)
        assert float(loss.detach()) == 0.0
        assert torch.autograd.grad(loss, inputs.logprob_N)[0].count_nonzero() == 0


def test_the_size_of_an_advantage_says_nothing():
    losses = []
    for scale in (1.0, 100.0):
        inputs = step([2, 3, 1], [scale, -scale, -scale])
        losses.append(loss_in_parts(inputs, [0, 0, 0], [[0, 1, 2]], 1, 0.5))
    assert torch.equal(*losses)


def test_a_micro_batch_without_tokens_adds_nothing():
    # A rank with less work forwards a single untrained token, which has a place in a group and no score.
    leaf, nothing = torch.zeros(0, requires_grad=True), torch.zeros(0)
    inputs = LossInputs(
        logprob_N=leaf,
        old_logprob_N=nothing,
        ref_logprob_N=None,
        advantage_N=nothing,
        sequence_N=torch.zeros(0, dtype=torch.long),
        trained_count_S=torch.tensor([0]),
        episode_count_S=torch.tensor([0]),
        denominators=Denominators(num_episodes=2, num_tokens=3, max_completion_length=9),
        contrast=contrast(
            torch.zeros(1), torch.zeros(1), torch.tensor([0]), torch.tensor([[1.0], [1.0], [1.0], [1.0]]), 0.5
        ),
    )
    loss = policy_loss(inputs, CONFIG).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
