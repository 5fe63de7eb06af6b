"""Gym environments of ms-swift (`swift.rollout.gym_env`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from covey.environments.swift.protocol import Messages, RolloutInferRequest
from covey.rewards.swift_standin import orm


class Env(ABC):
    """Plays one trajectory; `env_config` is the row's column of this name."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Begin: returns the first message of the user, notes, and the system prompt."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Take a turn, the last of the messages: returns the next message of the user, a reward, whether it
        is over, and notes."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what it holds."""


class MathEnv(Env):
    """Asks the column `problem` until the answer is the column `solution`."""

    again = "This answer is wrong. Check each step, then give the answer again."
    system = (
        "You solve problems. First work inside <think> and </think> tags, then give the answer inside "
        "<answer> and </answer> tags."
    )

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self._is_right = orm("accuracy")()
        self._solution = ""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Ask the problem of the row."""
        self._solution = config.data_dict["solution"]
        return config.data_dict["problem"], {}, self.system

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Pay 1 for the right answer, which ends it."""
        (reward,) = self._is_right([action[-1]["content"]], [self._solution])
        is_right = reward == 1
        return self.again, float(is_right), is_right, {}

    async def close(self) -> None:
        """Do nothing."""


ENVS: dict[str, type[Env]] = {"math_env": MathEnv}
