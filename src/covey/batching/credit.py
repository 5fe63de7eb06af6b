"""Credit: advantages, and every mask that enters a denominator, fixed for the whole rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from covey.algorithm.advantages import ScaleRewards, group_advantages, has_signal
from covey.types import AnnotatedSample, Finish, Sample, ScoredGroup, Status, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditConfig:
    """How rewards become advantages and which rows leave the loss."""

    scale_rewards: ScaleRewards
    mask_truncated_completions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCredit:
    """What the scores say of one row: its advantage, and why it is out of the loss where it is."""

    advantage: float
    masked: str | None


def row_credits(
    groups: Sequence[ScoredGroup], samples: Sequence[Sample], config: CreditConfig
) -> list[RowCredit]:
    """One credit a sample, in sample order.

    A row without a valid score is masked and enters no statistic of its group. A truncated row keeps its
    place in the statistics and leaves the loss where `mask_truncated_completions` says so.
    """
    width = max(len(g.scores) for g in groups)
    totals = [[_counted(scored, g) for g in range(width)] for scored in groups]
    reward = torch.tensor([[total or 0.0 for total in row] for row in totals], dtype=torch.float64)
    valid = torch.tensor([[total is not None for total in row] for row in totals])
    advantage = group_advantages(reward, valid, config.scale_rewards)
    # A group whose rewards are equal has an advantage of exactly 0, whatever rounding its mean has.
    advantage[~has_signal(reward, valid)] = 0.0
    advantages = advantage.float().tolist()
    credits = []
    for sample in samples:
        masked = None
        if totals[sample.group][sample.sibling] is None:
            masked = "invalid"
        elif config.mask_truncated_completions and sample.finish is Finish.LENGTH:
            masked = "truncated"
        elif not any(sample.is_trained):
            masked = "empty"
        credits.append(RowCredit(advantage=advantages[sample.group][sample.sibling], masked=masked))
    return credits


def _counted(scored: ScoredGroup, sibling: int) -> float | None:
    """The score of a sibling where it enters its group's statistics."""
    if sibling >= len(scored.scores) or sibling in scored.group.invalid:
        return None
    score = scored.scores[sibling]
    return score.total if score.status is Status.OK else None


def needs_forward(credit: RowCredit, *, may_skip_rows: bool) -> bool:
    """Whether a row can have a gradient. Rows out of the loss never have one; others may through a KL
    term."""
    if credit.masked is not None:
        return False
    return credit.advantage != 0.0 or not may_skip_rows


def credit_samples(
    annotated: Sequence[AnnotatedSample], credits: Sequence[RowCredit], *, may_skip_rows: bool
) -> list[TrainSample]:
    """Bring annotations and credits together."""
    return [
        TrainSample(
            annotated=row,
            advantage=credit.advantage,
            loss_mask=(credit.masked is None,) * sum(row.sample.is_trained),
            masked=credit.masked,
            needs_forward=needs_forward(credit, may_skip_rows=may_skip_rows),
        )
        for row, credit in zip(annotated, credits, strict=True)
    ]
