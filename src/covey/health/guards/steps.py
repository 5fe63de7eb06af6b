"""Rewards of steps that a run has no use for, found where their numbers are first seen."""

from __future__ import annotations

from collections.abc import Sequence

from covey.codes import Code
from covey.health.guard import Guard
from covey.health.words import broken
from covey.plan.step_refusals import StepRefusal
from covey.texts import tr
from covey.types import Fix, ScoredGroup, ScorePart

_ONE_FORM = Fix(
    text=tr(
        "return a list for every completion, or a number for every completion; None where the reward does "
        "not apply"
    )
)


def check_steps(groups: Sequence[ScoredGroup], refusals: Sequence[StepRefusal], step: int) -> None:
    """Raise GuardStop (F129) where a reward gave a list for one completion and a number for another, or one
    number per step where the run needs one per completion; `refusals` are the parts of it that do.
    """
    by_name: dict[str, list[ScorePart]] = {}
    for part in (p for g in groups for s in g.scores for p in s.parts if p.value is not None):
        by_name.setdefault(part.name, []).append(part)
    for name, parts in by_name.items():
        num_lists = sum(p.steps is not None for p in parts)
        if 0 < num_lists < len(parts):
            seen = tr(
                "the reward {name} returned lists for {num_lists} of {num_parts} completions and "
                "numbers for the others",
                name=name,
                num_lists=num_lists,
                num_parts=len(parts),
            )
            cause = tr(
                "One branch of the function returns a number, for example the one that handles errors."
            )
            raise broken("F129", step, seen, cause, _ONE_FORM)
        if num_lists and refusals:
            seen = tr(
                "the reward {name} returns one number per step, but {words}",
                name=name,
                words=refusals[0].words,
            )
            cause = tr("The trial of rewards was skipped, or its two rows had no steps.")
            raise broken("F129", step, seen, cause, *(refusal.fix for refusal in refusals))


F129 = Code(
    code="F129",
    title="Step rewards that the run cannot use",
    why="A list gives each token the advantage of its own step; a single number gives all tokens the same "
    "advantage. One reward cannot return both, and some losses and baselines need a single number.",
)

GUARD = Guard(
    place=2, of_rollout=lambda seen: check_steps(seen.groups, seen.refusals, seen.facts.step), codes=(F129,)
)
