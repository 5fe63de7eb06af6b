"""Rollouts made by hand: prompts, completions and scores as a run has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from covey.types import (
    Episode,
    EpisodeId,
    Finish,
    Group,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Source,
    TokenSequence,
)
from covey.types.arrays import bools, floats, ints, joined_runs

SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=24, stop_token_ids=(2,))
FIRST = Origin(epoch=0, rollout=0)


def prompt(
    number: int = 0, token_ids: Sequence[int] = (9,), *, origin: Origin = FIRST, **fields: Any
) -> Prompt:
    """Row `number` of the data."""
    given = {"messages": None, "text": f"row {number}", "columns": {}, **fields}
    return Prompt(id=number, token_ids=tuple(token_ids), origin=origin, **given)


def sequence(prompt: Sequence[int], *turns: tuple[Source, Sequence[int], int]) -> TokenSequence:
    """A prompt with turns behind it: who wrote a turn, its tokens, and the version that sampled them."""
    sampled = [(ids, version) for source, ids, version in turns if source is Source.MODEL]
    return TokenSequence(
        token_ids=ints([*prompt, *(i for _, ids, _ in turns for i in ids)]),
        is_trained=bools(
            [False] * len(prompt) + [source is Source.MODEL for source, ids, _ in turns for _ in ids]
        ),
        logprobs=floats([-1.0 - 0.25 * n for n in range(sum(len(ids) for ids, _ in sampled))]),
        versions=joined_runs([((version, len(ids)),) for ids, version in sampled]),
        sources=((Source.PROMPT, len(prompt)), *((source, len(ids)) for source, ids, _ in turns)),
    )


def episode(
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
) -> Episode:
    """The completion `own` of a prompt, of which the policy of this version sampled every token."""
    plain = sequence(prompt, (Source.MODEL, tuple(own), version))
    return Episode(
        id=EpisodeId(
            seed=0,
            split="train",
            rollout=origin.rollout,
            attempt=origin.attempt,
            prompt_id=number,
            sibling=sibling,
        ),
        sequences=(replace(plain, logprobs=floats(logprobs or [-1.0] * len(plain.logprobs))),),
        outcome=Outcome(finish),
        text=text,
        sampling=sampling,
    )


def scored(
    episodes: Sequence[Episode],
    scores: Sequence[Score],
    *,
    number: int = 0,
    asked: Prompt | None = None,
    **group: Any,
) -> ScoredGroup:
    """The siblings of a prompt, that of the first of them where none is given, with their scores."""
    asked = asked or prompt(number, episodes[0].sequences[0].prompt_ids.tolist())
    fields = {"planned": len(episodes), **group}
    return ScoredGroup(group=Group(prompt=asked, episodes=tuple(episodes), **fields), scores=tuple(scores))
