"""Rows to score: a prompt with columns, and what the model said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from covey.rewards.protocol import Scored
from covey.types import (
    Completion,
    Episode,
    EpisodeId,
    Finish,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    TokenSequence,
)
from covey.types.arrays import floats, ints


def make_scored(
    text: str,
    prompt: str = "Q?",
    ids: tuple[int, ...] = (1, 2),
    number: int = 0,
    turns: tuple[dict[str, str], ...] | None = None,
    opened: str = "",
    finish: Finish = Finish.STOP,
    **columns: Any,
) -> Scored:
    """A row; arguments that are not named here are columns."""
    return Scored(
        prompt=Prompt(
            id=number,
            messages=turns,
            opened=opened,
            text=prompt,
            token_ids=(9,),
            columns=columns,
            origin=Origin(epoch=0, rollout=0),
        ),
        episode=Episode(
            id=EpisodeId(seed=0, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0),
            sequences=(TokenSequence.of_turn((9,), _completion(ids, finish)),),
            outcome=Outcome(finish),
            text=text,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=()),
        ),
    )


def _completion(ids: tuple[int, ...], finish: Finish) -> Completion:
    return Completion(
        request_id=0,
        token_ids=ints(ids),
        logprobs=floats([-1.0] * len(ids)),
        versions=((0, len(ids)),),
        finish=finish,
        seconds=0.0,
    )


@pytest.fixture(scope="session")
def scored() -> Callable[..., Scored]:
    """`scored("the text", prompt="Q?", ids=(1, 2), solution="3")`; other arguments are columns."""
    return make_scored
