"""Rollouts made by hand: prompts, completions and scores as a run has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.types import (
    Finish,
    Group,
    Origin,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Segment,
    Source,
    Trajectory,
    TurnId,
)

SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=24, stop_token_ids=(2,))
FIRST = Origin(epoch=0, rollout=0)


def prompt(
    number: int = 0, token_ids: Sequence[int] = (9,), *, origin: Origin = FIRST, **fields: Any
) -> Prompt:
    """Row `number` of the data."""
    given = {"messages": None, "text": f"row {number}", "columns": {}, **fields}
    return Prompt(id=number, token_ids=tuple(token_ids), origin=origin, **given)


def trajectory(
    prompt: Sequence[int] = (9,),
    own: Sequence[int] = (1,),
    *,
    number: int = 0,
    sibling: int = 0,
    origin: Origin = FIRST,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    finish: Finish = Finish.STOP,
    text: str = "",
    sampling: SamplingParams = SAMPLING,
) -> Trajectory:
    """The completion `own` of a prompt, of which the policy of this version sampled every token."""
    answer = Segment(
        token_ids=tuple(own),
        source=Source.MODEL,
        trained=True,
        logprobs=tuple(logprobs or [-1.0] * len(own)),
        versions=(version,) * len(own),
    )
    return Trajectory(
        segments=(Segment(token_ids=tuple(prompt), source=Source.PROMPT, trained=False), answer),
        sampling=sampling,
        turn=TurnId(
            seed=0,
            split="train",
            rollout=origin.rollout,
            attempt=origin.attempt,
            prompt_id=number,
            sibling=sibling,
        ),
        finish=finish,
        text=text,
    )


def scored(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    *,
    number: int = 0,
    asked: Prompt | None = None,
    **group: Any,
) -> ScoredGroup:
    """The siblings of a prompt, that of the first of them where none is given, with their scores."""
    asked = asked or prompt(number, trajectories[0].segments[0].token_ids)
    fields = {"planned": len(trajectories), **group}
    return ScoredGroup(
        group=Group(prompt=asked, trajectories=tuple(trajectories), **fields), scores=tuple(scores)
    )
