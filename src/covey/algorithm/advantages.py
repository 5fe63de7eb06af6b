"""Group-relative advantages.

Axes: P prompts, G siblings of a group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]

# Added to the standard deviation, as in TRL; keeps a spread of rounding noise from being blown up.
STD_EPSILON = 1e-4


def group_advantages(reward_PG: Tensor, is_valid_PG: Tensor, scale: ScaleRewards) -> Tensor:
    """(reward - group mean) / (sample std + 1e-4), in float64; 0 for rows that are not valid.

    `reward_PG` float64, `is_valid_PG` bool. Invalid rows enter no statistic. `scale` says over what the
    standard deviation is taken: the `group`, all valid rows of the `batch`, or `none` for no division. A
    group with fewer than two valid rows has advantage 0 under `group`. Source: DeepSeekMath
    (arXiv:2402.03300) eq. 3 for `group`; Dr. GRPO (arXiv:2503.20783) for `none`.

    `group_advantages(tensor([[1., 0.]]), tensor([[True, True]]), "none")` is `[[0.5, -0.5]]`.
    """
    assert reward_PG.shape == is_valid_PG.shape and reward_PG.dim() == 2, "rewards and validity are (P, G)"
    assert reward_PG.dtype == torch.float64 and is_valid_PG.dtype == torch.bool
    reward_PG = torch.where(is_valid_PG, reward_PG, 0.0)
    count_P1 = is_valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = reward_PG.sum(dim=1, keepdim=True) / count_P1.clamp_min(1)
    centred_PG = torch.where(is_valid_PG, reward_PG - mean_P1, 0.0)
    if scale == "none":
        return centred_PG
    if scale == "batch":
        return centred_PG / (_sample_std(reward_PG[is_valid_PG]) + STD_EPSILON)
    variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (count_P1 - 1).clamp_min(1)
    return centred_PG / (variance_P1.sqrt() + STD_EPSILON)


def _sample_std(reward_X: Tensor) -> Tensor:
    if reward_X.numel() < 2:
        return torch.zeros((), dtype=reward_X.dtype)
    return reward_X.std()


def has_signal(reward_PG: Tensor, is_valid_PG: Tensor) -> Tensor:
    """Which groups (P,) hold two different valid rewards; every other group's advantages are exactly 0."""
    high_P = torch.where(is_valid_PG, reward_PG, float("-inf")).amax(dim=1)
    low_P = torch.where(is_valid_PG, reward_PG, float("inf")).amin(dim=1)
    return high_P > low_P
