"""The trial of rewards before a run: faults that every call would show are found on a few rows."""

from __future__ import annotations

from collections.abc import Sequence

from covey.rewards.protocol import RewardFault, Scored, TrainerState
from covey.rewards.reward_set import RewardSet
from covey.types import Status


def trial(rewards: RewardSet, rows: Sequence[Scored]) -> list[RewardFault]:
    """What went wrong when every reward was called on these rows, once per reward and row.

    Rows of one prompt come in one call, so that a function that gives one value for all of them shows. To be
    slow is no fault.
    """
    judged = rewards.score(rows, TrainerState(max_steps=1))
    return [
        RewardFault(
            reward=part.name, kind="trial", words=f"on row {row.prompt.id}, {_shown(row)}: {part.message}"
        )
        for row, said in zip(rows, judged.rows, strict=True)
        for part in said.parts
        if part.status not in (Status.OK, Status.TIMEOUT)
    ]


def _shown(row: Scored) -> str:
    return f"whose completion is {row.text!r:.60}" if row.text else "with an empty completion"
