"""A rehearsal: scripted policies in place of the model, against tools, environment, template and rewards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.agents import Agents, Notes
from covey.environments.protocol import EnvironmentHost, Lost, ToolHost
from covey.environments.tool import failed
from covey.plan.facts.tools import Rehearsal, RehearsedPolicy
from covey.rewards.protocol import Scored, TrainerState
from covey.rewards.registry import weighted
from covey.rewards.reward_set import RewardSet
from covey.rollout.scripted import ScriptedEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import (
    CallFailure,
    Episode,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Source,
    ToolCall,
    ToolResult,
    TurnId,
)

GOLD_TURNS = "gold_turns"
"""The column with the texts of the turns that solve a row."""

# Turns of a policy that never ends, where nothing else limits it; and random words of a turn.
_MOST_TURNS = 8
_WORDS = 12
# After so long no further script begins, and no further turn of one that plays: environments may be slow.
_SECONDS = 20.0

# The policy whose every call raises, whatever the tools do.
_CRASHING = "crashing tool"

Say = Callable[[int, "_Known"], str | None]
"""Gives the text of a turn, by its number, and what is known of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Holds what a script may know: the turns of a right episode, a call as the model writes it, one with
    arguments that fit and one without any, and words."""

    gold: Sequence[str]
    call: str | None
    empty_call: str | None
    words: Callable[[], str]


def _until(ends: float, say: Say, turn: int, known: _Known) -> str | None:
    """Return the next turn of a script; None, which ends the episode, where its time is over."""
    return None if turn and time.monotonic() > ends else say(turn, known)


def _first(turn: int, text: str | None) -> str | None:
    """Return a text as the first turn, and None after it."""
    return "" if turn and text is not None else text


_POLICIES: Mapping[str, Say] = {
    "gold": lambda turn, known: known.gold[min(turn, len(known.gold) - 1)] if known.gold else None,
    "random": lambda turn, known: known.words(),
    "silent": lambda turn, known: "",
    "broken call": lambda turn, known: (
        known.call and (known.call[: -len(known.call) // 3] if not turn else "")
    ),
    "wrong arguments": lambda turn, known: known.empty_call and (known.words() if turn else known.empty_call),
    _CRASHING: lambda turn, known: known.call and (known.words() if turn else known.call),
    "endless": lambda turn, known: known.call or known.words(),
}
"""The scripts by name; one that gives None at its first turn cannot be played."""


def _crashed(call: ToolCall, done: Callable[[ToolResult], None]) -> None:
    done(failed(call.name, CallFailure.RAISED, "RuntimeError: the tool crashed (covey's rehearsal)"))


class _CrashingTools:
    """Answers each call as a function that raises does."""

    def __init__(self, tools: ToolHost) -> None:
        self.schemas = tools.schemas

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Answer that the function raised."""
        _crashed(call, done)

    def close(self) -> None:
        """Do nothing: no process was started."""


class _CrashingMethods:
    """Answers each call of a method as one that raises does; environments do the rest."""

    def __init__(self, environments: EnvironmentHost) -> None:
        self._environments = environments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environments, name)

    def call(self, key: int, call: ToolCall, done: Callable[[ToolResult | Lost], None]) -> None:
        """Answer that the method raised."""
        _crashed(call, done)


def _crashing(agents: Agents) -> Agents:
    """Return the tools and environments of a run, with every call raising an exception."""
    environments: Any = None if agents.environment is None else _CrashingMethods(agents.environment)
    tools = None if agents.tools is None else _CrashingTools(agents.tools)
    return replace(agents, tools=tools, environment=environments)


def rehearse(
    prompt: Prompt,
    gold: str | None,
    codec: TextCodec,
    agents: Agents,
    rewards: RewardSet,
    weights: Sequence[float],
) -> Rehearsal:
    """Play every policy on two siblings of a prompt, and score them.

    The right turns are those of the row's column `gold_turns`, or else, without an environment, `gold` alone.
    """
    limits = replace(agents.limits, max_turns=agents.limits.max_turns or _MOST_TURNS)
    # What scripts make a scheduler do is no news of the run.
    keeps = agents.environment is not None
    agents = replace(agents, limits=limits, keeps_environments=keeps, notes=Notes())
    turns = prompt.columns.get(GOLD_TURNS) or ([gold] if gold and agents.environment is None else [])
    known = _known([*map(str, turns)], codec, agents, prompt.rendered_with.get("tools", ()))
    rows: list[RehearsedPolicy] = []
    sample, lost, rewritten = "", "", set[str]()
    alike: list[bool] = []
    ends = time.monotonic() + _SECONDS
    for number, (name, say) in enumerate(_POLICIES.items()):
        if say(0, known) is None or (rows and time.monotonic() > ends):
            continue
        cast = _crashing(agents) if name == _CRASHING else agents
        episodes = _play(prompt, number, partial(_until, ends, say), known, codec, cast)
        first = episodes[0]
        lost = lost or next((e.failure for e in episodes if e.outcome is Outcome.INFRASTRUCTURE), "")
        starts = [e.sequences[0].prompt_digest for e in episodes if e.sequences]
        alike += [len(set(starts)) == 1] if len(starts) > 1 else []
        total = _score(prompt, [e for e in episodes if e.sequences][:1], agents, rewards, weights)
        if len(first.sequences) > 1:
            rewritten.add(name)
        if not sample or (len(first.turns) > 1 and name in ("endless", "wrong arguments")):
            sample = marked(first, codec)
        rows.append(
            RehearsedPolicy(
                name=name,
                reward=total,
                outcome=str(first.outcome),
                num_turns=first.counts.num_turns,
                num_calls=first.counts.num_calls,
                num_failed_calls=first.counts.num_failed_calls,
                num_sequences=len(first.sequences),
                seconds=sum(turn.seconds for turn in first.turns),
            )
        )
    return Rehearsal(
        policies=tuple(rows),
        starts_alike=all(alike) if alike else None,
        lost=lost,
        rewritten=tuple(sorted(rewritten)),
        sample=sample,
    )


def marked(episode: Episode, codec: TextCodec, most: int | None = None) -> str:
    """Return an episode as text, with each trained turn between ⟦ and ⟧; of a prompt the last `most`
    characters."""
    parts = []
    for sequence in episode.tokens:
        start = 0
        for source, count in sequence.sources:
            text = codec.written_out(sequence.token_ids[start : start + count].tolist())
            if source is Source.PROMPT and most is not None and len(text) > most:
                text = f"…{text[-most:]}"
            parts.append(f"⟦{text}⟧" if source is Source.MODEL else text)
            start += count
        parts.append("\n")
    return "".join(parts).rstrip("\n")


def _play(
    prompt: Prompt, number: int, say: Say, known: _Known, codec: TextCodec, agents: Agents
) -> list[Episode]:
    """Return the episodes of two siblings, in order."""

    def script(turn: TurnId) -> str | None:
        return say(turn.turn, known)

    most = agents.limits.max_tokens
    plan = CollectPlan(
        num_generations=2,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=most, stop_token_ids=codec.stop_token_ids),
        seed=number,
        split="rehearsal",
    )
    taken = replace(prompt, token_ids=tuple(prompt.token_ids), origin=Origin(epoch=0, rollout=0))
    slots = slots_of([taken], plan)
    loop = TurnLoop(slots, ScriptedEngine(codec, script), codec, agents, Activity())
    found = dict(loop.episodes())
    return [found[slot] for slot in range(len(slots))]


def _score(
    prompt: Prompt, episodes: Sequence[Episode], agents: Agents, rewards: RewardSet, weights: Sequence[float]
) -> float | None:
    """Return the total of an episode and release its environment."""
    rows = [Scored.of(prompt, episode) for episode in episodes]
    total = None
    if rows:
        judged = rewards.score(rows, TrainerState(max_steps=1))
        total = weighted(judged, weights)[0].total
    keys = [e.environment for e in episodes if e.environment is not None]
    if keys and agents.environment is not None:
        agents.environment.release(keys)
    return total


def _known(
    gold: Sequence[str], codec: TextCodec, agents: Agents, schemas: Sequence[Mapping[str, Any]]
) -> _Known:
    rng = random.Random(0)
    size = codec.tokenizer.get_vocab_size()

    def words() -> str:
        return codec.decode([rng.randrange(size) for _ in range(_WORDS)])

    call = empty = None
    if agents.format is not None and schemas:
        function = schemas[0]["function"]
        fitting = ToolCall(name=function["name"], arguments=_arguments(function.get("parameters", {})))
        call = agents.format.write([fitting])
        empty = agents.format.write([ToolCall(name=function["name"])])
    return _Known(gold=gold, call=call, empty_call=empty, words=words)


def _arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the types that a schema asks for."""
    of_type = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    return {
        name: (said.get("enum") or [of_type.get(str(said.get("type")), "1")])[0]
        for name, said in parameters.get("properties", {}).items()
    }
