"""What environments return, read: what is meant, and what would be taken for something else."""

from __future__ import annotations

import numpy as np
import pytest

from covey.environments.protocol import Stepped
from covey.environments.returned import WrongReturn, read_step

SAID = ({"role": "user", "content": "again"},)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("again", Stepped(messages=SAID)),
        (list(SAID), Stepped(messages=SAID)),
        (([], True), Stepped(is_done=True)),
        ((list(SAID), False, 0.5), Stepped(messages=SAID, reward=0.5)),
        ((None, np.bool_(True), np.float32(1)), Stepped(is_done=True, reward=1.0)),
        ({"messages": list(SAID), "done": False, "reward": 1}, Stepped(messages=SAID, reward=1.0)),
    ],
)
def test_what_is_meant(value, expected) -> None:
    assert read_step(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        # A gym's order: reward before done.
        ("obs", 1.0, True),
        ([], 0.0, True),
        ("obs", 1, False),
        # It would go on without anything to answer.
        [],
        ([], False, 1.0),
        # Other lengths, roles and numbers.
        ("obs", 1.0, True, {}),
        [{"role": "robot", "content": "x"}],
        ("x", False, float("nan")),
        None,
        5,
    ],
)
def test_what_would_be_misread_is_refused(value) -> None:
    with pytest.raises(WrongReturn):
        read_step(value)
