"""Rollouts made by hand: scores and finishes in, scored groups out, with tokens that name their row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from covey.types import Finish, SamplingParams, Score, ScoredGroup, Status
from support.groups import episode, scored

SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=8, stop_token_ids=(2,))


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
        first: int = 100,
    ) -> ScoredGroup:
        lengths = lengths or [3] * len(totals)
        episodes = []
        for i, length in enumerate(lengths):
            own = range(first, first + length)
            first += length
            episodes.append(
                episode(
                    prompt,
                    own,
                    sibling=i,
                    logprobs=[-t / 1024 for t in own],
                    version=3,
                    finish=(finishes or {}).get(i, Finish.STOP),
                    sampling=SAMPLING,
                )
            )
        scores = [
            Score(total=None, parts=(), status=Status(t)) if isinstance(t, str) else Score(total=t, parts=())
            for t in totals
        ]
        return scored(episodes, scores)

    return make


@pytest.fixture(scope="session")
def pack_plan() -> Callable[..., Any]:
    """A plan for one rank of one, with everything in one step unless told otherwise."""
    from covey.batching.shares import PackPlan

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
