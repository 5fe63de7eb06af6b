"""Rollouts made by hand: scores and finishes in, scored groups out, with tokens that name their row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

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
    Status,
    Trajectory,
)

SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=8, stop_token_ids=(2,))


def _trajectory(sibling: int, prompt: Sequence[int], own: Sequence[int], finish: Finish) -> Trajectory:
    return Trajectory(
        segments=(
            Segment(token_ids=tuple(prompt), source=Source.PROMPT, trained=False),
            Segment(
                token_ids=tuple(own),
                source=Source.MODEL,
                trained=True,
                logprobs=tuple(-t / 1024 for t in own),
                versions=(3,) * len(own),
            ),
        ),
        sampling=SAMPLING,
        noise_key=NoiseKey(seed=0, split="train", rollout=0, attempt=0, prompt_id=0, sibling=sibling),
        finish=finish,
        text="",
    )


@pytest.fixture(scope="session")
def scored_group() -> Callable[..., ScoredGroup]:
    """`scored_group([1.0, None, "error"], finishes={0: Finish.LENGTH}, lengths=[4, 2, 0], prompt=[9])`.

    A total None is a row on which no reward spoke, a status is one that failed. Completion tokens count up
    from `first`, so that with distinct firsts a token names its row.
    """

    def make(
        totals: Sequence[float | str | None],
        *,
        prompt: Sequence[int] = (9, 8),
        lengths: Sequence[int] | None = None,
        finishes: dict[int, Finish] | None = None,
        invalid: dict[int, str] | None = None,
        first: int = 100,
    ) -> ScoredGroup:
        lengths = lengths or [3] * len(totals)
        trajectories = []
        for i, length in enumerate(lengths):
            own = range(first, first + length)
            first += length
            trajectories.append(_trajectory(i, prompt, own, (finishes or {}).get(i, Finish.STOP)))
        scores = [
            Score(total=None, parts=(), status=Status(t)) if isinstance(t, str) else Score(total=t, parts=())
            for t in totals
        ]
        group = Group(
            prompt=Prompt(
                id=0,
                messages=None,
                text="",
                token_ids=tuple(prompt),
                columns={},
                draw=Draw(epoch=0, rollout=0),
            ),
            trajectories=tuple(trajectories),
            planned=len(trajectories),
            invalid=invalid or {},
        )
        return ScoredGroup(group=group, scores=tuple(scores))

    return make


@pytest.fixture(scope="session")
def pack_plan() -> Callable[..., Any]:
    """A plan for one rank of one, with everything in one step unless told otherwise."""
    from covey.batching.pack import PackPlan

    def make(**changes: Any) -> PackPlan:
        fields = {
            "rank": 0,
            "world": 1,
            "completions_per_rank": 4,
            "num_iterations": 1,
            "max_tokens": 1000,
            "max_completion_length": 8,
            "stream": "prefix",
            "device": torch.device("cpu"),
        }
        return PackPlan(**{**fields, **changes})

    return make
