"""Credit: advantages, and every mask that enters a denominator, fixed for the whole rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.algorithm.advantages import advantages, decoupled_advantages, has_signal
from covey.algorithm.loss_types.registry import loss_named
from covey.batching.steps import RowIndex, step_advantages, token_advantages
from covey.codes import CODES
from covey.errors import GuardStop
from covey.options.algorithm import AlgorithmOptions
from covey.options.schema import CreditOptions
from covey.texts import tr
from covey.types import (
    AnnotatedSample,
    Finding,
    Fix,
    Outcome,
    Sample,
    Score,
    ScoredGroup,
    Status,
    TrainSample,
)
from covey.types.arrays import constant_bools

if TYPE_CHECKING:
    from covey.types.arrays import Floats

UNSCORED = ("invalid", "infrastructure")
"""Why a row is in no statistic of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCredit:
    """The advantage of one row, and why the row is left out of the loss, if it is.

    A row with `is_whole` is trained even where its advantage is 0. `token_advantages` is set where its tokens
    have different advantages; `advantage` is then their mean.
    """

    advantage: float
    masked: str | None
    is_whole: bool = False
    token_advantages: Floats | None = None


def row_credits(
    groups: Sequence[ScoredGroup],
    samples: Sequence[Sample],
    options: CreditOptions,
    divergences: Sequence[float] | None = None,
) -> list[RowCredit]:
    """One credit a sample, in sample order.

    A row without a valid score, or whose group an infrastructure failure has left without siblings, is masked
    and enters no statistic of its group. A truncated row keeps its place in the statistics and leaves the
    loss where `mask_truncated_completions` says so. `divergences` are the rows' log probabilities less those
    of the reference; `beta` times these is taken from the rewards of their episodes. Rewards of steps are
    compared separately from the total of the other rewards, and the two advantages are added. All rows of an
    episode have its advantage. The loss `real` trains every row of a group with signal, and raises GuardStop
    (F137) where an episode has several rows.
    """
    trains_groups = loss_named(options.loss_type).by_group
    if trains_groups:
        _refuse_several_rows(samples)
    width = max(len(g.scores) for g in groups)
    counted = {
        (p, g): score
        for p, scored in enumerate(groups)
        for g, score in enumerate(scored.scores)
        if is_counted(scored, g)
    }
    totals = [[_outcome(counted.get((p, g))) for g in range(width)] for p in range(len(groups))]
    reward = torch.tensor([[total or 0.0 for total in row] for row in totals], dtype=torch.float64)
    valid = torch.tensor([[total is not None for total in row] for row in totals])
    for sample, divergence in zip(samples, divergences or (), strict=divergences is not None):
        reward[sample.group, sample.sibling] -= options.beta * divergence
    if options.scale_rewards == "gdpo":
        advantage = decoupled_advantages(_parts(groups, width), torch.tensor(options.weights), valid)
    else:
        advantage = advantages(reward, valid, options.advantage_estimator, options.scale_rewards)
    values = advantage.float().tolist()
    of_steps = step_advantages(groups, counted, options.scale_rewards)
    whole = has_signal(reward, valid).tolist() if trains_groups else [False] * len(groups)
    credits = []
    written: dict[RowIndex, int] = {}
    for sample in samples:
        row_index = sample.group, sample.sibling
        value, tokens = values[sample.group][sample.sibling], None
        if row_index in of_steps:
            # Steps are counted in trained tokens over all sequences of an episode.
            steps, before = counted[row_index].steps, written.get(row_index, 0)
            assert steps is not None
            written[row_index] = before + sample.num_trained
            ends = [max(0, end - before) for end in steps.ends]
            outcome = float(advantage[row_index])
            value, tokens = _spread(sample, ends, of_steps[row_index], outcome)
        masked = _why_masked(sample, groups[sample.group], options, is_counted=row_index in counted)
        credits.append(
            RowCredit(advantage=value, masked=masked, is_whole=whole[sample.group], token_advantages=tokens)
        )
    return credits


def _why_masked(
    sample: Sample, scored: ScoredGroup, options: AlgorithmOptions, *, is_counted: bool
) -> str | None:
    """Why a row is out of the loss."""
    if not is_counted:
        return "infrastructure" if sample.sibling in scored.group.lost else "invalid"
    if options.mask_truncated_completions and sample.outcome is Outcome.TRUNCATED:
        return "truncated"
    return None if sample.num_trained else "empty"


def _refuse_several_rows(samples: Sequence[Sample]) -> None:
    """Raise GuardStop (F137) where a completion has several rows, of which `real` cannot tell one score."""
    num_rows = Counter((s.group, s.sibling) for s in samples)
    several = [(row_index, num) for row_index, num in num_rows.items() if num > 1]
    if not several:
        return
    (group, sibling), num = several[0]
    raise GuardStop(
        Finding(
            code="F137",
            seen=tr(
                "{num_several} of {num_completions} completions have several rows (completion {sibling} of "
                "group {group} has {num}), but loss_type is real, which needs one row per completion",
                num_several=len(several),
                num_completions=len(num_rows),
                sibling=sibling,
                group=group,
                num=num,
            ),
            why=CODES["F137"].why,
            cause=tr("The chat template changes earlier turns, so a later turn begins a new row."),
            fixes=(
                Fix(text=tr("use another loss"), edits={"loss_type": "dapo"}),
                Fix(text=tr("use a chat template that leaves earlier turns unchanged")),
            ),
        )
    )


def _spread(
    sample: Sample, ends: Sequence[int], of_steps: Sequence[float], outcome: float
) -> tuple[float, Floats | None]:
    """The mean advantage of a row's tokens and, where they differ, all of them."""
    tokens_N = token_advantages(sample.num_trained, ends, of_steps, outcome)
    tokens = tokens_N.tolist()
    if len(set(tokens)) > 1:
        return fmean(tokens), tokens_N
    return (tokens[0] if tokens else outcome), None


def _parts(groups: Sequence[ScoredGroup], width: int) -> Tensor:
    """Rewards one by one, float64 (P, G, K); NaN where a reward gave a row no value."""
    num = max(len(score.parts) for scored in groups for score in scored.scores)
    silent = [None] * num
    rows = [
        [[p.value for p in g.scores[i].parts] if i < len(g.scores) else silent for i in range(width)]
        for g in groups
    ]
    plain = [[[math.nan if v is None else v for v in parts or silent] for parts in row] for row in rows]
    return torch.tensor(plain, dtype=torch.float64)


def is_counted(scored: ScoredGroup, sibling: int) -> bool:
    """Whether a sibling enters its group's statistics: at least one reward gave it a value, and none
    failed."""
    score = scored.scores[sibling]
    spoke = score.total is not None or score.steps is not None
    return spoke and score.status is Status.OK and sibling not in scored.group.lost


def _outcome(score: Score | None) -> float | None:
    """What the rewards give a completion as a whole, where it counts."""
    if score is None or score.steps is None:
        return None if score is None else score.total
    return score.steps.outcome


def needs_forward(credit: RowCredit, *, may_skip_rows: bool) -> bool:
    """Whether a row can have a gradient. Rows out of the loss never have one; others may through a KL
    term."""
    if credit.masked is not None:
        return False
    has_advantage = credit.advantage != 0.0 or credit.token_advantages is not None
    return has_advantage or credit.is_whole or not may_skip_rows


def credit_samples(
    annotated: Sequence[AnnotatedSample], credits: Sequence[RowCredit], *, may_skip_rows: bool
) -> list[TrainSample]:
    """Bring annotations and credits together."""
    return [
        TrainSample(
            annotated=row,
            advantage=credit.advantage,
            loss_mask=constant_bools(credit.masked is None, row.sample.num_trained),
            masked=credit.masked,
            needs_forward=needs_forward(credit, may_skip_rows=may_skip_rows),
            token_advantages=credit.token_advantages,
        )
        for row, credit in zip(annotated, credits, strict=True)
    ]
