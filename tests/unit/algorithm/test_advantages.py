"""Group-relative advantages: hand-worked numbers, rows that are not valid, and groups that say nothing."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.advantages import advantages, has_signal

EPSILON = 1e-4


def group_advantages(reward: torch.Tensor, valid: torch.Tensor, scale: str) -> torch.Tensor:
    return advantages(reward, valid, "grpo", scale)


def rewards(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def everywhere(reward: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(reward, dtype=torch.bool)


def test_group_by_hand(assert_close_guarded):
    # (1, 0, 0, 1): mean 1/2, sample variance 4 (1/4) / 3 = 1/3. (2, 4, 6, 8): mean 5, variance (9+1+1+9) /
    # 3 = 20/3.
    reward = rewards([1, 0, 0, 1], [2, 4, 6, 8])
    one = 0.5 / (math.sqrt(1 / 3) + EPSILON)
    two = math.sqrt(20 / 3) + EPSILON
    expected = [[one, -one, -one, one], [-3 / two, -1 / two, 1 / two, 3 / two]]
    assert_close_guarded(group_advantages(reward, everywhere(reward), "group"), expected, rtol=1e-12)


def test_batch_by_hand(assert_close_guarded):
    # Rewards 1, 0, 3, 3: mean 1.75, squares 0.5625 + 3.0625 + 2 (1.5625) = 6.75, over 3 is 2.25: std 1.5.
    reward = rewards([1, 0], [3, 3])
    value = 0.5 / (1.5 + EPSILON)
    expected = [[value, -value], [0.0, 0.0]]
    assert_close_guarded(group_advantages(reward, everywhere(reward), "batch"), expected, rtol=1e-12)


def test_none_by_hand(assert_close_guarded):
    reward = rewards([1, 0, 0], [5, 5, 8])
    expected = [[2 / 3, -1 / 3, -1 / 3], [-1, -1, 2]]
    assert_close_guarded(group_advantages(reward, everywhere(reward), "none"), expected, rtol=1e-12)


@pytest.mark.parametrize("junk", [100.0, float("nan"), float("inf")])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rows_that_are_not_valid_enter_no_statistic(scale, junk, assert_close_guarded):
    reward = rewards([1, junk, 0, 2], [4, 6, junk, junk])
    valid = reward != junk if junk == junk else ~reward.isnan()
    got = group_advantages(reward, valid, scale)
    assert got[~valid].count_nonzero() == 0
    # (1, 0, 2): mean 1, variance 1. (4, 6): mean 5, variance 2. All five: mean 2.6, squares 2.56 + 6.76 +
    # 0.36 + 1.96 + 11.56 = 23.2, over 4 is 5.8.
    divisors = {"group": (1.0, math.sqrt(2)), "batch": (math.sqrt(5.8),) * 2, "none": (1 - EPSILON,) * 2}
    first, second = (d + EPSILON for d in divisors[scale])
    expected = [[0, 0, -1 / first, 1 / first], [-1 / second, 1 / second, 0, 0]]
    assert_close_guarded(got, expected, rtol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_one_valid_row_and_none(scale):
    reward = rewards([7, 1, 2], [3, 4, 5])
    valid = torch.tensor([[True, False, False], [False, False, False]])
    assert group_advantages(reward, valid, scale).count_nonzero() == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage(scale):
    reward = rewards([1, 1, 1, 1], [0, 0, 0, 0])
    assert group_advantages(reward, everywhere(reward), scale).count_nonzero() == 0


def test_signal():
    reward = rewards([1, 1, 1], [1, 0, 1], [5, 9, 5], [2, 3, 4], [0.1, 0.1, 0.1])
    valid = torch.tensor([[True] * 3, [True] * 3, [True, False, True], [False] * 3, [True] * 3])
    assert has_signal(reward, valid).tolist() == [False, True, False, False, False]


def test_what_is_refused():
    reward = rewards([1, 2])
    with pytest.raises(AssertionError):
        group_advantages(reward.float(), everywhere(reward), "group")
    with pytest.raises(AssertionError):
        group_advantages(reward[0], everywhere(reward)[0], "group")
