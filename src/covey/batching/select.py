"""Select: which groups of a rollout have signal for the update, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal, get_args

from covey.algorithm.advantages import STD_EPSILON
from covey.batching.credit import UNSCORED, is_counted, needs_forward, row_credits
from covey.batching.samples import to_samples
from covey.options.schema import CreditOptions
from covey.types import ScoredGroup

Silence = Literal["equal", "invalid", "masked"]
SILENCES: tuple[Silence, ...] = get_args(Silence)


def silences(groups: Sequence[ScoredGroup], options: CreditOptions) -> list[Silence | None]:
    """Why each group has no signal; None where it has one.

    `equal`: every advantage is 0. `invalid`: fewer than two completions have a reward. `masked`: those with
    an advantage are out of the loss. Only rewards count here, not a KL penalty that is subtracted from them.
    """
    if not groups:
        return []
    rows = iter(row_credits(groups, to_samples(groups), options))
    reasons: list[Silence | None] = []
    for scored in groups:
        members = [next(rows) for _ in scored.scores]
        if any(needs_forward(m, may_skip_rows=True) for m in members):
            reasons.append(None)
        elif sum(m.masked not in UNSCORED for m in members) < 2:
            reasons.append("invalid")
        else:
            reasons.append("masked" if any(m.advantage for m in members) else "equal")
    return reasons


def strength(scored: ScoredGroup) -> float:
    """The sum of |advantage| of a group times the standard deviation of its rewards: TRL's score of a stored
    group.

    Advantages are in units of the group's own spread, so that groups of different rollouts compare. Rewards
    of 1, 1, 0, 0 give 2, those of 1, 0, 0, 0 give 1.5.
    """
    counted = [s.total for i, s in enumerate(scored.scores) if is_counted(scored, i)]
    values = [total for total in counted if total is not None]
    if len(values) < 2:
        return 0.0
    mean, spread = fmean(values), stdev(values)
    return sum(abs(v - mean) for v in values) / (spread + STD_EPSILON) * spread
