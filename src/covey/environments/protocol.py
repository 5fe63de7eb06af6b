"""Declares how a rollout asks tools and environments: each answer comes later, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """An environment that was reset. `messages` are all messages of the prompt (None: those of the row), of
    which the first `kept` are the row's own; `added` is what is written behind the last of them, text or
    content blocks; `tools` are those that the episode has. `max_tokens` and `stop` limit the turn."""

    messages: tuple[Message, ...] | None = None
    added: Any = None
    tools: tuple[Schema, ...] = ()
    kept: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Says how the conversation of a scheduler stands at its next request: the first `kept` messages are what
    they were, the last turn among them as it was sampled, and `messages` follow.

    With `goes_on` the last message, behind the kept ones, is the assistant's, whose last turn begins with
    what was sampled, or with a part of it, and has become this text: the model goes on with it. With
    `is_rewritten` something before the last turn has changed; `{"item": 2}` among `messages` stands for what
    was message 2 until now.
    """

    kept: int = 0
    messages: tuple[Message, ...] = ()
    goes_on: str | None = None
    is_rewritten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Says what a scheduler made of its episode.

    `masks` say of each sampled turn which of its tokens are trained; `is_masked`: the scheduler has masked
    some itself. `last_turns` are those that its outputs end with. `messages` are the conversation as it
    ended, `outputs` what rewards are told of each output, `infos` the scheduler's notes, `total_reward` the
    reward that it gives (None: none). `notes` say what covey does in another way than it asked for.
    """

    masks: tuple[tuple[bool, ...], ...] = ()
    is_masked: bool = False
    last_turns: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    infos: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Mapping[str, Any], ...] = ()
    total_reward: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Holds the answer to a turn: the messages that follow, whether the episode is over, and a reward
    for the turn (None: it gives none).

    A scheduler says instead how its whole conversation goes on (`history`), within the limits `max_tokens`
    and `stop`, or how it has `ended`.
    """

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    reward: float | None = None
    history: History | None = None
    ended: Ended | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None


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
    `has_tools`. `keeps_history`: it is a scheduler, which answers with the whole conversation, and is told of
    cut turns too.
    `has_reward`: `reward` is asked at the end of an episode. `takes_seed`: `reset` is passed the seed.
    `schemas` are those of tools that every environment has, which prompts tell the model of.
    """

    name: str
    has_step: bool
    keeps_history: bool
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
        "number"}`; a scheduler also gets `token_ids`, `logprobs` and the `length` of what stood in front."""
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
