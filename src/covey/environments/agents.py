"""Runs the tools and environment of an episode between its turns, and holds its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from covey.data.text import TextCodec
from covey.environments.call_format import CallFormat, Parsed
from covey.environments.protocol import EnvironmentHost, Schema, ToolHost
from covey.environments.rendering import Renderer, Spoken
from covey.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits the turns, calls and tokens of an episode.

    `max_turns` counts turns of the model, `max_tool_rounds` those whose calls are answered; None is no limit.
    `max_tokens` is the most tokens behind the prompt, or with `is_per_turn` of one turn; results of tools are
    cut to `max_result_tokens` each. `context` is what the model can hold. `trains_last`: of several turns the
    last one alone is trained.
    """

    max_tokens: int
    is_per_turn: bool = False
    max_turns: int | None = None
    max_tool_rounds: int | None = None
    max_result_tokens: int | None = None
    context: int | None = None
    trains_last: bool = False


@dataclass(slots=True)
class Notes:
    """Holds what people should know of a scheduler, each sentence once in a run."""

    _new: list[str] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def add(self, words: str) -> None:
        """Note a sentence."""
        if words not in self._known:
            self._known.add(words)
            self._new.append(words)

    def take(self) -> list[str]:
        """Return what is new since the last call."""
        return [self._new.pop(0) for _ in range(len(self._new))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Tools, an environment or both, and how the model is told of them.

    `starts_differ`: the episodes of a group may begin differently. `keeps_environments`: rewards read them,
    so that they live until their episode is scored. `notes` collects what a scheduler asked for that is done
    in another way.
    """

    renderer: Renderer
    limits: TurnLimits
    format: CallFormat | None = None
    tools: ToolHost | None = None
    environment: EnvironmentHost | None = None
    starts_differ: bool = False
    keeps_environments: bool = False
    keys: count[int]
    notes: Notes = field(default_factory=Notes)

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """Return the tools that every episode has."""
        own = () if self.tools is None else tuple(self.tools.schemas.values())
        return own if self.environment is None else (*own, *self.environment.schemas)

    def close(self) -> None:
        """End what runs tools and environments."""
        for host in (self.tools, self.environment):
            if host is not None:
                host.close()


def spoken_turn(
    completion: Completion, before: Sequence[int], opened: str, codec: TextCodec, agents: Agents
) -> Spoken:
    """Read a turn of the model, of which `opened` stood there; `before` are the tokens in front of it where
    the turn goes on with them."""
    ids = completion.token_ids.tolist()
    is_ended = bool(ids) and ids[-1] in codec.stop_token_ids
    written = ids[:-1] if is_ended else ids
    raw = codec.decode_behind(before, written, marks=True)
    whole = opened + raw
    parsed = Parsed(content=whole, calls=()) if agents.format is None else agents.format.parse(whole)
    added = codec.tokenizer.get_added_tokens_decoder()
    return Spoken(
        raw=raw,
        opened=opened,
        end=ids[-1] if is_ended else None,
        content=parsed.content.removeprefix(agents.renderer.lead),
        calls=parsed.calls,
        marks=frozenset(added[i].content for i in {*written} if i in added),
    )
