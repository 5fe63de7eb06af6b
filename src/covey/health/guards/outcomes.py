"""Episodes that infrastructure failures have cost: a few are left out of a rollout, many stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from covey.codes import Code
from covey.errors import GuardStop
from covey.health.guard import Guard
from covey.health.words import broken
from covey.texts import joined, tr
from covey.types import Episode, Fix, Outcome, ScoredGroup

# The share of a rollout's episodes that may be lost; one lost episode says nothing yet.
_MOST_LOST, _LEAST_LOST = 0.05, 2
_MOST_NAMED = 5


def check_outcomes(groups: Sequence[ScoredGroup], step: int) -> None:
    """Raise GuardStop (F138) where more than 5 % of a rollout's episodes, and at least two, ended in an
    infrastructure failure: the rest may be a choice of what works, such as the short ones."""
    lost, num = _lost(groups)
    if len(lost) >= _LEAST_LOST and len(lost) > _MOST_LOST * num:
        again = Fix(
            text=tr(
                "start the servers again, or mend what else failed, then resume with "
                "--resume_from_checkpoint auto; the same completions are drawn again"
            )
        )
        raise _stop(lost, num, step, again)


def refuse_lost(groups: Sequence[ScoredGroup], step: int) -> None:
    """Raise GuardStop (F138) where an infrastructure failure has cost an evaluation any episode."""
    lost, num = _lost(groups)
    if lost:
        again = Fix(
            text=tr(
                "start the servers again, or mend what else failed, then repeat the evaluation; a run "
                "resumed with --resume_from_checkpoint auto repeats it by itself"
            )
        )
        raise _stop(lost, num, step, again)


def _lost(groups: Sequence[ScoredGroup]) -> tuple[list[Episode], int]:
    """The lost episodes, and how many there are in all."""
    episodes = [e for g in groups for e in g.group.episodes]
    return [e for e in episodes if e.outcome is Outcome.INFRASTRUCTURE], len(episodes)


def _stop(lost: Sequence[Episode], num: int, step: int, again: Fix) -> GuardStop:
    ledger = Counter(e.failure for e in lost).most_common(_MOST_NAMED)
    seen = tr(
        "{num_lost} of {num_episodes} completions were lost: {ledger}",
        num_lost=len(lost),
        num_episodes=num,
        ledger=joined("; ", [tr("{num} × {failure}", num=num, failure=failure) for failure, num in ledger]),
    )
    cause = tr("A server, a sandbox or a service that the completions need has stopped or is overloaded.")
    return broken("F138", step, seen, cause, again)


F138 = Code(
    code="F138",
    title="Completions lost to infrastructure failures",
    why="A completion that is lost to a broken server or sandbox is left out; it does not count as a reward "
    "of 0. If more than 5 % of a rollout are lost, and at least two, the others may no longer represent "
    "what the model does. An evaluation needs all of its completions.",
)

GUARD = Guard(place=1, of_rollout=lambda seen: check_outcomes(seen.sampled, seen.facts.step), codes=(F138,))
