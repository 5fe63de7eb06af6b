"""Baselines of siblings and of the whole rollout, rewards kept apart, and the noise below which rewards are
equal: by hand, against loops, and where there is nothing to compare."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from covey.algorithm.advantages import NOISE, STD_EPSILON, advantages, decoupled_advantages, has_signal


def rewards(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def everywhere(reward: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(reward, dtype=torch.bool)


def of(reward: torch.Tensor, estimator: str, scale: str, valid: torch.Tensor | None = None) -> torch.Tensor:
    return advantages(reward, everywhere(reward) if valid is None else valid, estimator, scale)


# -- rloo --------------------------------------------------------------------------------------------------


def test_rloo_by_hand(assert_close_guarded):
    # (1, 0, 0, 1) against the mean of the three others: 1 - 1/3, 0 - 2/3. Of two, the difference.
    assert_close_guarded(
        of(rewards([1, 0, 0, 1]), "rloo", "none"), [[2 / 3, -2 / 3, -2 / 3, 2 / 3]], rtol=1e-12
    )
    assert_close_guarded(of(rewards([3, 1]), "rloo", "none"), [[2, -2]], rtol=1e-12)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_rloo_against_the_loop(scale, assert_close_guarded):
    generator = torch.Generator().manual_seed(4)
    reward = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    valid = torch.rand(4, 5, generator=generator) < 0.8
    found = of(reward, "rloo", scale, valid)
    every = reward[valid].tolist()
    expected = torch.zeros_like(reward)
    for p in range(4):
        own = [i for i in range(5) if valid[p, i]]
        for i in own:
            others = [float(reward[p, j]) for j in own if j != i]
            value = float(reward[p, i]) - statistics.mean(others)
            spread = {
                "none": 1.0,
                "group": statistics.stdev([float(reward[p, j]) for j in own]) + STD_EPSILON,
                "batch": statistics.stdev(every) + STD_EPSILON,
            }
            expected[p, i] = value / spread[scale]
    assert_close_guarded(found, expected, rtol=1e-12)


def test_rloo_of_a_single_valid_row_is_nothing():
    valid = torch.tensor([[True, False, False]])
    assert of(rewards([1, 2, 3]), "rloo", "none", valid).count_nonzero() == 0


# -- reinforce_plus_plus -----------------------------------------------------------------------------------


def test_reinforce_plus_plus_by_hand(assert_close_guarded):
    # Rewards 1, 0, 3, 4: mean 2, squares 1 + 4 + 1 + 4 over 3.
    reward = rewards([1, 0], [3, 4])
    assert_close_guarded(of(reward, "reinforce_plus_plus", "none"), [[-1, -2], [1, 2]], rtol=1e-12)
    spread = math.sqrt(10 / 3) + STD_EPSILON
    scaled = [[-1 / spread, -2 / spread], [1 / spread, 2 / spread]]
    assert_close_guarded(of(reward, "reinforce_plus_plus", "batch"), scaled, rtol=1e-12)


def test_it_compares_completions_of_different_prompts(assert_close_guarded):
    # One completion a prompt: nothing to compare within a group, and everything over them.
    reward = rewards([1], [0], [0], [1])
    found = of(reward, "reinforce_plus_plus", "none")
    assert_close_guarded(found, [[0.5], [-0.5], [-0.5], [0.5]], rtol=1e-12)
    assert of(reward, "grpo", "none").count_nonzero() == 0
    # Groups that are equal within, and differ from each other.
    assert of(rewards([1, 1], [0, 0]), "reinforce_plus_plus", "batch").count_nonzero() == 4


def test_rows_that_are_not_valid_enter_no_baseline(assert_close_guarded):
    reward, valid = rewards([1, 99], [3, 5]), torch.tensor([[True, False], [True, True]])
    assert_close_guarded(of(reward, "reinforce_plus_plus", "none", valid), [[-2, 0], [0, 2]], rtol=1e-12)


def test_a_rollout_of_equal_rewards_has_exactly_none():
    reward = torch.full((3, 4), 0.1, dtype=torch.float64)
    for scale in ("none", "batch"):
        assert of(reward, "reinforce_plus_plus", scale).count_nonzero() == 0


def test_the_spread_of_a_group_is_refused_without_its_baseline():
    with pytest.raises(AssertionError, match="spread of a group"):
        of(rewards([1, 0]), "reinforce_plus_plus", "group")


# -- gdpo --------------------------------------------------------------------------------------------------


def test_gdpo_by_hand(assert_close_guarded):
    # Rewards (1, 0) and (0, 10): each is 1 / sqrt(2) of its own spread from its mean of a half of its range.
    reward = rewards([1, 0], [0, 10]).T.reshape(1, 2, 2)
    one = 0.5 / (math.sqrt(0.5) + STD_EPSILON)
    two = 5.0 / (math.sqrt(50.0) + STD_EPSILON)
    sums = [2 * one - two, -2 * one + two]
    spread = statistics.stdev(sums) + STD_EPSILON
    weight = torch.tensor([2.0, 1.0])
    found = decoupled_advantages(reward, weight, torch.tensor([[True, True]]))
    assert_close_guarded(found, [[s / spread for s in sums]], rtol=1e-12)


def loop_of_gdpo(reward: torch.Tensor, weight: list[float], valid: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(reward.shape[:2], dtype=torch.float64)
    for p in range(reward.shape[0]):
        for k, w in enumerate(weight):
            own = [
                i for i in range(reward.shape[1]) if valid[p, i] and not math.isnan(float(reward[p, i, k]))
            ]
            values = [float(reward[p, i, k]) for i in own]
            if len(values) < 2 or max(values) == min(values):
                continue
            for i, value in zip(own, values, strict=True):
                gap = value - statistics.mean(values)
                total[p, i] += w * gap / (statistics.stdev(values) + STD_EPSILON)
    return total / (statistics.stdev(total[valid].tolist()) + STD_EPSILON)


def test_gdpo_against_the_loop_with_silent_rewards_and_invalid_rows(assert_close_guarded):
    generator = torch.Generator().manual_seed(6)
    reward = torch.randn(4, 5, 3, dtype=torch.float64, generator=generator)
    reward[1, :, 0] = 0.7  # equal within the group
    reward[2, 3, 1] = float("nan")
    reward[3, :, 2] = float("nan")
    valid = torch.rand(4, 5, generator=generator) < 0.8
    found = decoupled_advantages(reward, torch.tensor([1.0, 2.0, 0.5]), valid)
    assert_close_guarded(found, loop_of_gdpo(reward, [1.0, 2.0, 0.5], valid), rtol=1e-12)
    assert found[~valid].count_nonzero() == 0


def test_gdpo_of_two_tasks_by_hand(assert_close_guarded):
    # The first group has the first reward alone, 1 and 0; the second group the second alone, 0 and 30, and a
    # third that both have and that differs in the first group only, by 4.
    no = float("nan")
    reward = torch.tensor(
        [[[1.0, no, 0.0], [0.0, no, 4.0]], [[no, 0.0, 2.0], [no, 30.0, 2.0]]], dtype=torch.float64
    )
    one = 0.5 / (math.sqrt(0.5) + STD_EPSILON)
    two = 15.0 / (math.sqrt(450.0) + STD_EPSILON)
    three = 2.0 / (math.sqrt(8.0) + STD_EPSILON)
    sums = [one - 3 * three, -one + 3 * three, -2 * two, 2 * two]
    spread = statistics.stdev(sums) + STD_EPSILON
    valid = torch.ones(2, 2, dtype=torch.bool)
    found = decoupled_advantages(reward, torch.tensor([1.0, 2.0, 3.0]), valid)
    assert_close_guarded(found, [[s / spread for s in sums[:2]], [s / spread for s in sums[2:]]], rtol=1e-12)


def test_a_reward_of_wide_range_does_not_drown_another():
    # A length reward of hundreds beside a correct answer: as one sum the answer hardly counts.
    answer, length = [1.0, 0.0, 1.0, 0.0], [100.0, 500.0, 480.0, 120.0]
    reward = torch.tensor([list(zip(answer, length, strict=True))], dtype=torch.float64)
    valid = torch.ones(1, 4, dtype=torch.bool)
    apart = decoupled_advantages(reward, torch.tensor([1.0, 1.0]), valid)[0]
    together = advantages(reward.sum(dim=2), valid, "grpo", "group")[0]
    right, wrong = (0, 3), (3, 0)
    assert apart[right[0]] - apart[right[1]] > 10 * (together[wrong[1]] - together[wrong[0]]).abs()


def test_gdpo_of_equal_rewards_is_exactly_nothing():
    reward = torch.full((2, 3, 2), 0.1, dtype=torch.float64)
    valid = torch.ones(2, 3, dtype=torch.bool)
    assert decoupled_advantages(reward, torch.tensor([1.0, 1.0]), valid).count_nonzero() == 0
    with pytest.raises(AssertionError, match="one by one"):
        advantages(reward[:, :, 0], valid, "grpo", "gdpo")


# -- noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_rewards_that_differ_by_rounding_are_equal(size):
    apart = rewards([size, size * (1 + 3 * NOISE)], [-size, -size * (1 + 3 * NOISE)])
    equal = rewards([size, size * (1 + NOISE / 3)], [-size, -size * (1 + NOISE / 3)])
    valid = everywhere(apart)
    assert has_signal(apart, valid).tolist() == [True, True]
    assert has_signal(equal, valid).tolist() == [False, False]
    for estimator in ("grpo", "rloo"):
        for scale in ("none", "group", "batch"):
            assert of(equal[:1], estimator, scale).count_nonzero() == 0
    # The float32 of a reward model: a sum in another order.
    third = float(torch.tensor(0.1) + torch.tensor(0.2))
    assert has_signal(rewards([third, 0.3]), torch.ones(1, 2, dtype=torch.bool)).tolist() == [False]


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        *((e, s) for e in ("grpo", "rloo") for s in ("none", "group", "batch")),
        ("reinforce_plus_plus", "none"),
        ("reinforce_plus_plus", "batch"),
    ],
)
def test_order_and_sign(estimator, scale, assert_close_guarded):
    generator = torch.Generator().manual_seed(3)
    reward = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    found = of(reward, estimator, scale)
    order = torch.randperm(6, generator=generator)
    assert_close_guarded(of(reward[:, order], estimator, scale), found[:, order], rtol=1e-12)
    assert_close_guarded(of(-reward, estimator, scale), -found, rtol=1e-12)
    assert_close_guarded(of(reward + 7.0, estimator, scale), found, rtol=1e-12)
    assert abs(float(found.sum())) < 1e-12 * reward.numel()
