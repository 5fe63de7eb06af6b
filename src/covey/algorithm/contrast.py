"""The loss `real`: the completions of a group told apart by their scores, as a classifier would.

The score of a completion is the mean of its log ratios over tau. A group in which some advantages are above 0
and some are not has the loss log(1 + sum over the others of exp(score)) + log(1 + sum over the good of
exp(-score)); every other group has none. A group may lie in several micro-batches and on several ranks, so
that its sums are taken over all of them before the first backward pass, with the scores of that moment.

Axes: S sequences of a micro-batch, P groups of the step. Source: REAL (arXiv:2602.05630).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What a sequence's score is multiplied by in the loss, and its share of the loss's value, both (S,)."""

    coefficient_S: Tensor
    value_S: Tensor


def contrast_sums(score_S: Tensor, advantage_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """Sums (4, P) of one micro-batch: exp(-score) of the good, exp(score) of the others, and their numbers.

    Float64; those of all micro-batches and ranks are added up.
    """
    is_good_S = advantage_S > 0
    score_S = score_S.double()
    terms = (
        torch.where(is_good_S, torch.exp(-score_S), 0.0),
        torch.where(is_good_S, 0.0, torch.exp(score_S)),
        is_good_S.double(),
        (~is_good_S).double(),
    )
    out_4P = score_S.new_zeros(4, num_groups)
    return out_4P.index_add(1, group_S, torch.stack(terms))


def contrast(score_S: Tensor, advantage_S: Tensor, group_S: Tensor, sums_4P: Tensor, tau: float) -> Contrast:
    """The derivative of the step's loss by each sequence's mean log ratio, and the value's shares.

    The step's loss is the mean over all its groups, those without a contrast included.
    """
    good_P, other_P, num_good_P, num_other_P = sums_4P
    is_told_P = (num_good_P > 0) & (num_other_P > 0)
    value_P = torch.where(is_told_P, torch.log1p(good_P) + torch.log1p(other_P), 0.0)
    members_P = (num_good_P + num_other_P).clamp_min(1)
    num_groups, is_good_S, score_S = sums_4P.shape[1], advantage_S > 0, score_S.double()
    derivative_S = torch.where(
        is_good_S,
        -torch.exp(-score_S) / (1.0 + good_P[group_S]),
        torch.exp(score_S) / (1.0 + other_P[group_S]),
    )
    coefficient_S = torch.where(is_told_P[group_S], derivative_S / tau, 0.0) / num_groups
    return Contrast(
        coefficient_S=coefficient_S.float(),
        value_S=((value_P / members_P)[group_S] / num_groups).float(),
    )
