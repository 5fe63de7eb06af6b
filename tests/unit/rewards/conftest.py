"""Rows to score: a prompt with columns, and what the model said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from covey.rewards.protocol import Scored
from covey.types import Finish, Origin, Prompt
from support.groups import episode


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
        episode=episode((9,), ids, finish=finish, text=text),
    )


@pytest.fixture(scope="session")
def scored() -> Callable[..., Scored]:
    """`scored("the text", prompt="Q?", ids=(1, 2), solution="3")`; other arguments are columns."""
    return make_scored
