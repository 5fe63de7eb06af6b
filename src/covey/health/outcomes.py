"""Episodes that infrastructure failures have cost a rollout: a few are left out, many stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from covey.health.words import broken
from covey.texts import joined, tr
from covey.types import Fix, Outcome, ScoredGroup

# The share of a rollout's episodes that may be lost; one lost episode says nothing yet.
_MOST_LOST, _LEAST_LOST = 0.05, 2
_MOST_NAMED = 5


def check_outcomes(groups: Sequence[ScoredGroup], step: int) -> None:
    """Raise GuardStop (F138) where more than 5 % of a rollout's episodes, and at least two, ended in an
    infrastructure failure: the rest may be a choice of what works, such as the short ones."""
    episodes = [e for g in groups for e in g.group.episodes]
    lost = [e for e in episodes if e.outcome is Outcome.INFRASTRUCTURE]
    if len(lost) < _LEAST_LOST or len(lost) <= _MOST_LOST * len(episodes):
        return
    ledger = Counter(e.failure for e in lost).most_common(_MOST_NAMED)
    seen = tr(
        "{num_lost} of {num_episodes} completions were lost: {ledger}",
        num_lost=len(lost),
        num_episodes=len(episodes),
        ledger=joined("; ", [f"{num} × {failure}" for failure, num in ledger]),
    )
    raise broken(
        "F138",
        step,
        seen,
        tr("A server, a sandbox or a service that the completions need has stopped or is overloaded."),
        Fix(text=tr("mend what failed, then resume; the same completions are drawn again")),
    )
