"""An episode in progress, and what is made of it for tools, environments and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from covey.environments.draft import EpisodeDraft
from covey.environments.histories import SaidText
from covey.environments.protocol import Ended
from covey.environments.rendering import Item, Spoken
from covey.rewards.images import told as image_told
from covey.rollout.slots import Slot
from covey.texts import tr
from covey.types import (
    CallFailure,
    Completion,
    Episode,
    EpisodeId,
    Outcome,
    Prompt,
    ToolCall,
    ToolResult,
    Turn,
)
from covey.types.turns import TurnCounts


@dataclass(frozen=True, slots=True)
class EndReward:
    """Holds the reward that an environment gave at the end of an episode."""

    value: Any


@dataclass(slots=True)
class Running:
    """An episode in progress. `missing` are the calls of the present turn that have no result yet, `begun` is
    the prompt as text and as messages where an environment has made it.

    Of a scheduler: `max_tokens` and `stop` are those of its next request, `said` is the last turn as it was
    told, `is_full` says that it was told of a turn for which there was no room, and `ended` how it ended.
    """

    slot: Slot
    key: int
    draft: EpisodeDraft | None = None
    turns: list[Turn] = field(default_factory=list)
    schemas: tuple[Mapping[str, Any], ...] = ()
    of_environment: frozenset[str] = frozenset()
    spoken: Spoken | None = None
    results: dict[int, ToolResult] = field(default_factory=dict)
    missing: int = 0
    since: float = 0.0
    outcome: Outcome = Outcome.SCORED
    sampled_s: float = 0.0
    num_sampled: int = 0
    num_tool_rounds: int = 0
    asked: int = 0
    begun: tuple[str, tuple[Mapping[str, Any], ...]] | None = None
    reward: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    said: SaidText = field(default_factory=SaidText)
    is_full: bool = False
    ended: Ended | None = None


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of a prompt as environments are given it: columns, messages and images."""
    messages = {"prompt": list(prompt.messages)} if prompt.messages else {}
    images = {"images": [*map(image_told, prompt.media)]} if prompt.media else {}
    return {**prompt.columns, **images, **messages}


def added_to(messages: Sequence[Item], added: Any, hide: Callable[[str], str]) -> tuple[Item, ...]:
    """Return messages whose last one goes on with what an environment has written: text, which is hidden, or
    blocks."""
    *before, last = messages
    assert not isinstance(last, Spoken)
    content = last.get("content") or ""
    if isinstance(added, str) and isinstance(content, str):
        joined: Any = content + hide(added)
    else:
        joined = [*blocks(content), *blocks(added)]
    return (*before, {**last, "content": joined})


def ended_episode(one: Running, *, keeps_environment: bool) -> Episode:
    """Return the episode that has ended; its environment lives on where a reward reads it."""
    assert one.draft is not None
    return Episode(
        id=one.slot.episode_id,
        sequences=one.draft.sequences(),
        outcome=one.outcome,
        text=one.turns[-1].text if one.turns else "",
        sampling=one.slot.plan.sampling,
        seconds=one.sampled_s + sum(turn.seconds for turn in one.turns),
        turns=tuple(one.turns),
        counts=TurnCounts.of(one.turns),
        environment=one.key if keeps_environment else None,
        environment_reward=one.reward,
        prompt_text="" if one.begun is None else one.begun[0],
        prompt_messages=None if one.begun is None else one.begun[1],
    )


def lost_episode(slot: Slot, failure: str) -> Episode:
    """Return the episode of a slot that infrastructure has failed."""
    return Episode(
        id=slot.episode_id,
        sequences=(),
        outcome=Outcome.INFRASTRUCTURE,
        text="",
        sampling=slot.plan.sampling,
        failure=failure,
    )


def no_room(length: int, contexts: Sequence[int]) -> str:
    """Return why an episode cannot begin, whose prompt has `length` tokens."""
    return tr(
        "the environment made a prompt of {length} tokens, but model and engine hold {context} (with vLLM "
        "--vllm_max_model_len)",
        length=length,
        context=min(contexts),
    )


def group_seed(episode: EpisodeId) -> int:
    """Return the seed that the environments of a group begin with, 0 to 2**31 - 1: siblings begin alike."""
    group = replace(episode, sibling=0).turn_id().text
    return int.from_bytes(blake2b(group.encode(), digest_size=4).digest(), "little") >> 1


def told(one: Running, spoken: Spoken, completion: Completion) -> dict[str, Any]:
    """Return a turn as an environment is given it."""
    return {
        "text": one.turns[-1].opened + one.turns[-1].text,
        "content": spoken.content,
        "tool_calls": [
            {"name": call.name, "arguments": dict(call.arguments), "fault": call.fault}
            for call in spoken.calls
        ],
        "finish": str(completion.finish),
        "number": len(one.turns) - 1,
    }


def refused(call: ToolCall, names: Sequence[str]) -> ToolResult:
    """Return the result of a call that no tool is asked with."""
    if call.fault:
        return ToolResult(name=call.name, content=f"Error: {call.fault}", failure=CallFailure.UNREADABLE)
    known = ", ".join(names) or "none"
    return ToolResult(
        name=call.name,
        content=f"Error: there is no tool {call.name!r}; the tools are: {known}",
        failure=CallFailure.UNKNOWN,
    )


def blocks(content: Any) -> list[Any]:
    """Return the blocks of a content that may be a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
