"""Recorded episodes made once more by an engine that plays their tokens: against their tools and their
environment, or against what these answered then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.environments.protocol import Lost, Opened, Stepped
from covey.rollout.collect import episode_loop
from covey.rollout.scripted import Script, ScriptedEngine
from covey.rollout.slots import Slot
from covey.types import Completion, Episode, Finish, Outcome, Source, ToolCall, ToolResult, TurnId
from covey.types.arrays import constant_floats, ints, joined_ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An episode with tokens as it was recorded, the slot that draws it, and the messages of its prompt where
    an environment made them (None: those of the row)."""

    slot: Slot
    episode: Episode
    messages: tuple[Mapping[str, Any], ...] | None = None


def answered_again(
    every: Sequence[Recorded], codec: TextCodec, agents: Agents
) -> tuple[list[Episode], list[Opened | None]]:
    """Give tools and environments the recorded turns again. Returns the episodes that come of it, and what
    each environment opened with; None where it failed, or there is none."""
    turns = {one.episode.id: turns_of(one.episode) for one in every}

    def script(turn: TurnId) -> Completion:
        return _turn(turns[turn.episode], turn.turn)

    environment: Any = None if agents.environment is None else _Remembering(agents.environment)
    given = replace(agents, environment=environment, keeps_environments=False, keys=count())
    made = _made(every, codec, given, script)
    opened = {} if environment is None else environment.opened
    return made, [opened.get(key) for key in range(len(every))]


def rendered_again(one: Recorded, codec: TextCodec, agents: Agents | None, opened: Opened) -> Episode:
    """Render an episode again from its turns and from what was answered; `agents` say of what kind its tools
    and environment are, and `opened` what its environment began with. None of them is asked."""
    turns, answers = turns_of(one.episode), _Answers(one.episode, opened)

    def script(turn: TurnId) -> Completion:
        answers.turn = turn.turn
        return _turn(turns, turn.turn)

    if agents is None:
        return _made([one], codec, None, script)[0]
    tools, environment = agents.tools, agents.environment
    recorded: Any = _RecordedEnvironment(environment is not None and environment.has_step, answers)
    given = replace(
        agents,
        # Recorded results are cut already.
        limits=replace(agents.limits, max_result_tokens=None),
        tools=None if tools is None else _RecordedTools(tools.schemas, answers),
        environment=None if environment is None else recorded,
        keeps_environments=False,
        keys=count(),
    )
    return _made([one], codec, given, script)[0]


def turns_of(episode: Episode) -> list[Completion]:
    """Return the turns of the model as an engine gives them."""
    pieces = []
    for sequence in episode.tokens:
        start = 0
        for source, num in sequence.sources:
            if source is Source.MODEL:
                pieces.append(sequence.token_ids[start : start + num])
            start += num
    last, own = len(pieces) - 1, episode.turns
    if len(own) == len(pieces):
        pieces = [joined_ints([ids, ints(turn.cut_ids)]) for ids, turn in zip(pieces, own, strict=True)]
    cut = [number < len(own) and own[number].is_truncated for number in range(len(pieces))]
    return [
        Completion(
            request_id=0,
            token_ids=ids,
            logprobs=constant_floats(0.0, len(ids)),
            versions=((0, len(ids)),),
            finish=Finish.LENGTH
            if cut[number]
            else (_last_finish(episode, ids.tolist()) if number == last else Finish.STOP),
            seconds=0.0,
        )
        for number, ids in enumerate(pieces)
    ]


def _last_finish(episode: Episode, ids: Sequence[int]) -> Finish:
    """Return why the last turn ended: an episode that is cut may have ended its turn, and had no room for
    what followed."""
    if episode.outcome is Outcome.ABORTED:
        return Finish.ABORT
    if episode.outcome is not Outcome.TRUNCATED:
        return Finish.STOP
    is_answered = bool(episode.turns) and bool(episode.turns[-1].answer or episode.turns[-1].results)
    is_ended = bool(ids) and ids[-1] in episode.sampling.stop_token_ids
    return Finish.STOP if is_answered or is_ended else Finish.LENGTH


def _turn(turns: Sequence[Completion], number: int) -> Completion:
    """Return a turn; one that the record does not have ends the episode."""
    return turns[number] if number < len(turns) else Completion.aborted(0)


def _made(
    every: Sequence[Recorded], codec: TextCodec, agents: Agents | None, script: Script
) -> list[Episode]:
    engine = ScriptedEngine(codec, script)
    found = dict(episode_loop([one.slot for one in every], engine, codec, agents, Activity()).episodes())
    return [found[number] for number in range(len(every))]


class _Remembering:
    """Remembers what each environment opened with; environments do the rest."""

    def __init__(self, environments: Any) -> None:
        self._environments = environments
        self.opened: dict[int, Opened] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environments, name)

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Reset an environment."""

        def remember(opened: Opened | Lost) -> None:
            if isinstance(opened, Opened):
                self.opened[key] = opened
            done(opened)

        self._environments.open(key, row, seed, remember)


@dataclass(slots=True)
class _Answers:
    """Gives what followed each turn of a recorded episode; `turn` is the number of the last one played."""

    episode: Episode
    opened: Opened
    turn: int = 0
    _given: set[tuple[int, int]] = field(default_factory=set)

    def result(self, call: ToolCall) -> ToolResult:
        """Return what a call of this turn gave; each result is given once."""
        turn = self.episode.turns[self.turn]
        left = [i for i in range(len(turn.results)) if (self.turn, i) not in self._given]
        same = [i for i in left if turn.calls[i] == call]
        if not left:
            return ToolResult(name=call.name, content="")
        index = (same or left)[0]
        self._given.add((self.turn, index))
        return turn.results[index]

    def step(self) -> Stepped:
        """Return what answered this turn."""
        turns = self.episode.turns
        is_last = self.turn == len(turns) - 1
        turn = turns[self.turn]
        is_done = is_last and self.episode.outcome is Outcome.SCORED
        return Stepped(messages=turn.answer, is_done=is_done, reward=turn.reward)


class _RecordedTools:
    """Answers calls as tools did."""

    def __init__(self, schemas: Mapping[str, Any], answers: _Answers) -> None:
        self.schemas, self._answers = schemas, answers

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Answer with the recorded result."""
        done(self._answers.result(call))

    def close(self) -> None:
        """Do nothing: no process was started."""


class _RecordedEnvironment:
    """Answers as the environment of an episode did; what it gives at the end is not asked."""

    has_reward = keeps_history = False

    def __init__(self, has_step: bool, answers: _Answers) -> None:
        self.has_step, self._answers = has_step, answers

    def open(self, key: int, row: Any, seed: int, done: Callable[[Any], None]) -> None:
        """Begin as it did."""
        done(self._answers.opened)

    def step(self, key: int, turn: Any, done: Callable[[Any], None]) -> None:
        """Answer a turn as it did."""
        done(self._answers.step())

    def call(self, key: int, call: ToolCall, done: Callable[[Any], None]) -> None:
        """Answer with the recorded result."""
        done(self._answers.result(call))

    def release(self, keys: Sequence[int]) -> None:
        """Do nothing: nothing was made."""
