"""Advantages: what a reward says of a completion, compared with others.

Axes: P prompts, G siblings of a group, K rewards.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
ScaleRewards = Literal["group", "batch", "none", "gdpo"]

# Added to the standard deviation, as in TRL; keeps a spread of rounding noise from being blown up.
STD_EPSILON = 1e-4
# Rewards that differ by less than this share of the largest are equal: a sum in another order, or a model's
# float32.
NOISE = 1e-6


def advantages(reward_PG: Tensor, is_valid_PG: Tensor, estimator: Estimator, scale: ScaleRewards) -> Tensor:
    """(reward - baseline) / (spread + 1e-4), in float64; 0 for rows that are not valid.

    `reward_PG` float64, `is_valid_PG` bool. Invalid rows enter no statistic. The baseline of `grpo` is the
    group's mean, of `rloo` the mean of the other siblings, of `reinforce_plus_plus` the mean of all valid
    rows. `scale` says over what the sample standard deviation is taken: the rewards of the `group`, all valid
    rows of the `batch`, or `none` for no division. A group without signal has advantage 0, but under
    reinforce_plus_plus, which compares over groups. Sources: DeepSeekMath (arXiv:2402.03300) eq. 3; RLOO
    (arXiv:2402.14740) eq. 6; REINFORCE++ (arXiv:2501.03262) eq. 8; Dr. GRPO (arXiv:2503.20783) for `none`.

    `advantages(tensor([[1., 0.]]), tensor([[True, True]]), "grpo", "none")` is `[[0.5, -0.5]]`.
    """
    assert reward_PG.shape == is_valid_PG.shape and reward_PG.dim() == 2, "rewards and validity are (P, G)"
    assert reward_PG.dtype == torch.float64 and is_valid_PG.dtype == torch.bool
    assert scale != "gdpo", "gdpo needs the rewards one by one"
    reward_PG = torch.where(is_valid_PG, reward_PG, 0.0)
    if estimator == "reinforce_plus_plus":
        out_PG = _over_batch(reward_PG, is_valid_PG, scale)
        return out_PG if has_signal(_row(reward_PG), _row(is_valid_PG)).any() else out_PG * 0.0
    count_P1 = is_valid_PG.sum(dim=1, keepdim=True)
    centred_PG = _centred(reward_PG, is_valid_PG)
    if estimator == "rloo":
        centred_PG = centred_PG * count_P1 / (count_P1 - 1).clamp_min(1)
    if scale == "batch":
        centred_PG = centred_PG / (_sample_std(reward_PG[is_valid_PG]) + STD_EPSILON)
    if scale == "group":
        centred_PG = centred_PG / (_group_std(reward_PG, is_valid_PG) + STD_EPSILON)
    # A group whose rewards are equal has an advantage of exactly 0, whatever rounding its mean has.
    return torch.where(has_signal(reward_PG, is_valid_PG)[:, None], centred_PG, 0.0)


def decoupled_advantages(reward_PGK: Tensor, weight_K: Tensor, is_valid_PG: Tensor) -> Tensor:
    """Each reward in units of its own spread within the group, then added up: GDPO, in float64.

    `reward_PGK` float64 with NaN where a reward did not speak of a row. Each reward is centred and divided by
    its group's sample standard deviation + 1e-4, the results are added with their weights, and the sums
    divided by their own standard deviation over all valid rows + 1e-4. Source: GDPO (arXiv:2601.05242).
    """
    assert reward_PGK.dtype == torch.float64 and reward_PGK.dim() == 3, "rewards are (P, G, K)"
    total_PG = torch.zeros(reward_PGK.shape[:2], dtype=torch.float64)
    for reward_PG, weight in zip(reward_PGK.unbind(dim=2), weight_K.tolist(), strict=True):
        spoke_PG = is_valid_PG & ~reward_PG.isnan()
        one_PG = advantages(torch.nan_to_num(reward_PG), spoke_PG, "grpo", "group")
        total_PG = total_PG + weight * one_PG
    return total_PG / (_sample_std(total_PG[is_valid_PG]) + STD_EPSILON)


def has_signal(reward_PG: Tensor, is_valid_PG: Tensor) -> Tensor:
    """Which groups (P,) hold two different valid rewards; in every other one siblings say nothing of each
    other.

    Rewards are equal where they differ by less than a millionth of the largest.
    """
    high_P = torch.where(is_valid_PG, reward_PG, float("-inf")).amax(dim=1)
    low_P = torch.where(is_valid_PG, reward_PG, float("inf")).amin(dim=1)
    return high_P - low_P > NOISE * torch.maximum(high_P.abs(), low_P.abs())


def _over_batch(reward_PG: Tensor, is_valid_PG: Tensor, scale: ScaleRewards) -> Tensor:
    assert scale != "group", "a baseline over the batch has no spread of a group"
    centred_PG = _centred(_row(reward_PG), _row(is_valid_PG)).view_as(reward_PG)
    if scale == "none":
        return centred_PG
    return centred_PG / (_sample_std(reward_PG[is_valid_PG]) + STD_EPSILON)


def _row(value_PG: Tensor) -> Tensor:
    """All groups as one."""
    return value_PG.reshape(1, -1)


def _centred(reward_PG: Tensor, is_valid_PG: Tensor) -> Tensor:
    count_P1 = is_valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = reward_PG.sum(dim=1, keepdim=True) / count_P1.clamp_min(1)
    return torch.where(is_valid_PG, reward_PG - mean_P1, 0.0)


def _group_std(reward_PG: Tensor, is_valid_PG: Tensor) -> Tensor:
    count_P1 = is_valid_PG.sum(dim=1, keepdim=True)
    square_P1 = _centred(reward_PG, is_valid_PG).square().sum(dim=1, keepdim=True)
    return (square_P1 / (count_P1 - 1).clamp_min(1)).sqrt()


def _sample_std(reward_X: Tensor) -> Tensor:
    if reward_X.numel() < 2:
        return torch.zeros((), dtype=reward_X.dtype)
    return reward_X.std()
