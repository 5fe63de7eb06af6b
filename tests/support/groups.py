"""Rollouts made by hand: prompts, completions and scores as a run has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.types import (
    Draw,
    Finish,
    Group,
    NoiseKey,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Segment,
    Source,
    Trajectory,
)

SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=24, stop_token_ids=(2,))


def trajectory(
    prompt: Sequence[int] = (9,),
    own: Sequence[int] = (1,),
    *,
    number: int = 0,
    sibling: int = 0,
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
        noise_key=NoiseKey(seed=0, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling),
        finish=finish,
        text=text,
    )


def scored(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], *, number: int = 0, **group: Any
) -> ScoredGroup:
    """The siblings of a prompt with their scores."""
    prompt = Prompt(
        id=number,
        messages=None,
        text="",
        token_ids=trajectories[0].segments[0].token_ids,
        columns={},
        draw=Draw(epoch=0, rollout=0),
    )
    fields = {"planned": len(trajectories), **group}
    return ScoredGroup(
        group=Group(prompt=prompt, trajectories=tuple(trajectories), **fields), scores=tuple(scores)
    )
