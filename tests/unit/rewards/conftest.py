"""Rows to score: a prompt with columns, and what the model said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from covey.rewards.protocol import Scored
from covey.types import (
    Finish,
    Origin,
    Prompt,
    SamplingParams,
    Segment,
    Source,
    Trajectory,
    TurnId,
)


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
        trajectory=Trajectory(
            segments=(
                Segment(token_ids=(9,), source=Source.PROMPT, trained=False),
                Segment(
                    token_ids=ids,
                    source=Source.MODEL,
                    trained=True,
                    logprobs=(-1.0,) * len(ids),
                    versions=(0,) * len(ids),
                ),
            ),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=()),
            turn=TurnId(seed=0, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0),
            finish=finish,
            text=text,
        ),
    )


@pytest.fixture(scope="session")
def scored() -> Callable[..., Scored]:
    """`scored("the text", prompt="Q?", ids=(1, 2), solution="3")`; other arguments are columns."""
    return make_scored
