"""The reward that an environment gives."""

from __future__ import annotations

from collections.abc import Sequence

from covey.rewards.declare import BuiltIn


def environment(*, environment_reward: Sequence[float | None]) -> list[float | None]:
    """Return the environment's reward of each episode: its `get_reward`, or the sum over its turns."""
    return list(environment_reward)


ENVIRONMENT = BuiltIn(name="environment", function=environment)
