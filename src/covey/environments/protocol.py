"""Declares how a rollout asks tools and environments: each answer comes later, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.rewards.protocol import Environments
from covey.types import ToolCall, ToolResult
from covey.types.turns import ToolFault as ToolFault

Schema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": …, "description": …,
"parameters": {…}}}`."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An environment that failed: `words` say how. The episode is an infrastructure failure."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An environment that was reset. `messages` are all messages of the prompt (None: those of the row);
    `added` is what is written behind the last of them, text or content blocks; `tools` are those that the
    episode has."""

    messages: tuple[Message, ...] | None = None
    added: Any = None
    tools: tuple[Schema, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Holds the answer to a turn: the messages that follow, whether the episode is over, and a reward
    for the turn (None: it gives none)."""

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    reward: float | None = None


class ToolHost(Protocol):
    """Runs functions as tools. `schemas` are by name, in the order in which they were given."""

    @property
    def schemas(self) -> Mapping[str, Schema]: ...

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Start a call whose name is known; `done` is told its result from any thread, once. A function that
        fails is a result too; nothing is raised."""
        ...

    def close(self) -> None:
        """End its processes; calls that run end as failed."""
        ...


class EnvironmentHost(Environments, Protocol):
    """Makes environments, one an episode, by `key`.

    `has_step`: each turn goes to the environment (`step`); otherwise its methods are tools (`call`), where it
    `has_tools`.
    `has_reward`: `reward` is asked at the end of an episode. `takes_seed`: `reset` is passed the seed.
    `schemas` are those of tools that every environment has, which prompts tell the model of.
    """

    name: str
    has_step: bool
    has_tools: bool
    has_reward: bool

    @property
    def schemas(self) -> Sequence[Schema]: ...

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Make an environment and reset it: `row` has the columns, and `prompt` as messages where there are
        any."""
        ...

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Stepped | Lost], None]) -> None:
        """Give it a turn of the model: `{"text", "content", "tool_calls": [{"name", "arguments"}], "finish",
        "number"}`."""
        ...

    def call(self, key: int, call: ToolCall, done: Callable[[ToolResult | Lost], None]) -> None:
        """Call one of its methods as a tool."""
        ...

    def reward(self, key: int, done: Callable[[float | Lost | None], None]) -> None:
        """Ask for the reward of the episode."""
        ...

    def release(self, keys: Sequence[int]) -> None:
        """Forget environments; `close` of those that have one is called."""
        ...

    def close(self) -> None:
        """End its process; what runs in it ends as lost."""
        ...
