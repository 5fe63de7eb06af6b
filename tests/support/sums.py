"""Episodes of three sums each: as an environment of a run, and as one within a process whose answers may
come late."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.environments.protocol import Opened, Stepped
from covey.environments.template_calls import format_of
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import (
    Completion,
    Episode,
    EpisodeId,
    GenerationRequest,
    Origin,
    Prompt,
    SamplingParams,
    Source,
    TokenSequence,
    ToolCall,
    ToolResult,
)
from support.agents import SCHEMA, agents_for
from support.tool_templates import QWEN3, with_template

TURNS = 3

FILE = '''
"""Three sums, one after the other."""

import os
import random
import re
import time

SLOW_S = float(os.environ.get("COVEY_TEST_SLOW_S", "0"))


class Sums:
    def reset(self, row, seed):
        self.draw, self.turn = random.Random(seed), 0
        return self.ask()

    def ask(self):
        a, b = self.draw.randrange(10), self.draw.randrange(10)
        self.sum = a + b
        return [{"role": "user", "content": f"{a}+{b}="}]

    def step(self, turn):
        time.sleep(SLOW_S)
        self.turn += 1
        found = re.findall("[0-9]+", turn["text"])
        right = bool(found) and int(found[-1][:9]) == self.sum
        return self.ask(), self.turn == 3, right + 0.01 * len(turn["text"])
'''
"""The environment of a run. Rewards differ within most groups: longer answers have more."""


@dataclass(frozen=True)
class Gaps:
    """The largest difference of logprobs, and the root of the mean square."""

    worst: float
    mean: float


def sums_file(folder: Path) -> str:
    """Write the environment into a folder; returns how a run is told of it."""
    (folder / "sums.py").write_text(FILE)
    return f"{folder / 'sums.py'}:Sums"


def thinking_template(folder: Path) -> str:
    """Write a template that drops the thoughts of earlier turns, so that each turn begins a new sequence."""
    path = folder / "thinking.jinja"
    path.write_text(QWEN3)
    return str(path)


def thinking(codec: TextCodec) -> TextCodec:
    """The codec with such a template."""
    return with_template(codec, QWEN3)


Delay = Callable[[int, int], float]
"""How long an answer takes in seconds, by the number of the episode and of the turn."""


class SumsHost:
    """The same environment in this process. With a `delay` answers come from threads of their own."""

    name, has_step, has_reward = "sums", True, False
    keeps_history = False

    def __init__(self, delay: Delay | None = None) -> None:
        self._delay = delay
        self._draws: dict[int, random.Random] = {}
        self.released: list[int] = []

    def open(self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Any], None]) -> None:
        self._draws[key] = random.Random(seed)
        done(Opened(messages=(self._ask(key),)))

    def _ask(self, key: int) -> dict[str, Any]:
        draw = self._draws[key]
        return {"role": "user", "content": f"{draw.randrange(10)}+{draw.randrange(10)}="}

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Any], None]) -> None:
        number, length = turn["number"], len(turn["text"])
        answer = Stepped(messages=(self._ask(key),), is_done=number == TURNS - 1, reward=0.01 * length)
        later(self._delay and self._delay(key, number), lambda: done(answer))

    def release(self, keys: Sequence[int]) -> None:
        self.released += keys

    def close(self) -> None:
        pass


def later(seconds: float | None, act: Callable[[], None]) -> None:
    """Act now, or so many seconds from now in another thread."""
    if seconds is None:
        act()
        return
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


class LateTools:
    """The tool `calculate`, whose results come from threads of their own."""

    def __init__(self, delay: Delay | None = None) -> None:
        self.schemas = {"calculate": SCHEMA}
        self._delay, self.num_calls = delay, 0

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        self.num_calls += 1
        result = ToolResult(name=call.name, content=str(len(str(call.arguments))))
        later(self._delay and self._delay(self.num_calls, 0), lambda: done(result))

    def close(self) -> None:
        pass


def sums_agents(codec: TextCodec, delay: Delay | None = None, **limits: Any) -> Agents:
    """The environment for a model of this codec."""
    form = format_of(codec)
    agents = agents_for(codec, environment=SumsHost(delay), form=form, **limits)
    return replace(agents, format=None)


def tool_agents(codec: TextCodec, delay: Delay | None = None, rounds: int = TURNS - 1) -> Agents:
    """A tool that each turn is taken for a call of: a random model is seldom one that calls."""
    form = format_of(codec)
    assert form is not None

    def parse(text: str) -> Any:
        call = ToolCall(name="calculate", arguments={"expression": text[:7]}, text=text)
        return replace(form.parse(""), calls=(call,))

    agents = agents_for(codec, LateTools(delay), form=form, max_tool_rounds=rounds)  # type: ignore[arg-type]
    return replace(agents, format=replace(form, parse=parse))


def sum_prompts(codec: TextCodec, count: int, *, tools: Sequence[Mapping[str, Any]] = ()) -> list[Prompt]:
    """Prompts of different lengths."""
    found = []
    for number in range(count):
        message = {"role": "user", "content": f"What is {7**number}+{number}?"}
        text = codec.render([message], tools=tools)
        found.append(
            Prompt(
                id=number,
                messages=(message,),
                text=text,
                token_ids=codec.encode([text])[0],
                columns={},
                origin=Origin(epoch=0, rollout=0),
                rendered_with={"tools": [*tools]} if tools else {},
            )
        )
    return found


@dataclass
class Played:
    """The episodes of a rollout in the order of their slots, and the requests that an engine was given."""

    episodes: list[Episode]
    requests: list[GenerationRequest] = field(default_factory=list)

    @property
    def sequences(self) -> list[TokenSequence]:
        """All sequences, episode after episode."""
        return [sequence for episode in self.episodes for sequence in episode.sequences]

    @property
    def tokens(self) -> list[list[list[int]]]:
        """The tokens of each sequence of each episode."""
        return [[s.token_ids.tolist() for s in episode.sequences] for episode in self.episodes]

    @property
    def texts(self) -> list[list[str]]:
        """The turns of each episode."""
        return [[turn.text for turn in episode.turns] for episode in self.episodes]

    @property
    def num_unknown(self) -> int:
        """The tokens that an engine with a cache has not seen before: each prompt once for its siblings, all
        that was sampled, and of an extended turn what is new and the token that was sampled last."""
        first = {request.prompt_token_ids for request in self.requests if request.extends is None}
        before = {request.turn: request for request in self.requests}
        sampled = sum(sequence.num_trained for sequence in self.sequences)
        tokens = {episode.id: episode for episode in self.episodes}
        new = 0
        for request in self.requests:
            if request.extends is not None:
                earlier = before[request.extends]
                written = _written(tokens[_episode_of(request)])[request.extends.turn]
                new += len(request.prompt_token_ids) - len(earlier.prompt_token_ids) - written + 1
        return sampled + new + sum(map(len, first))


def _episode_of(request: GenerationRequest) -> EpisodeId:
    return EpisodeId(**{name: getattr(request.turn, name) for name in EpisodeId.__dataclass_fields__})


def _written(episode: Episode) -> list[int]:
    """The tokens of each turn of the model."""
    return [n for s in episode.sequences for source, n in s.sources if source is Source.MODEL]


def play(
    engine: Any,
    prompts: Sequence[Prompt],
    codec: TextCodec,
    agents: Agents,
    *,
    siblings: int = 4,
    most: int = 96,
    temperature: float = 1.0,
    filters: Mapping[str, Any] | None = None,
    more_ends: Sequence[int] = (),
    on_completion: Callable[[Completion], None] = lambda completion: None,
) -> Played:
    """Sample a rollout. `more_ends` are tokens that end a turn too, as a random model
    seldom writes its own."""
    ends = (*codec.stop_token_ids, *more_ends)
    sampling = SamplingParams(
        temperature=temperature, max_new_tokens=most, stop_token_ids=ends, **(filters or {})
    )
    agents = replace(agents, limits=replace(agents.limits, max_tokens=most))
    plan = CollectPlan(num_generations=siblings, sampling=sampling, seed=1)
    slots = slots_of(prompts, plan)
    played = Played([])
    submit, results = engine.submit, engine.results

    def watched(request: GenerationRequest) -> int:
        played.requests.append(request)
        return submit(request)

    def told() -> Any:
        for completion in results():
            on_completion(completion)
            yield completion

    engine.submit, engine.results = watched, told
    try:
        found = dict(TurnLoop(slots, engine, codec, agents, Activity()).episodes())
    finally:
        engine.submit, engine.results = submit, results
    played.episodes = [found[number] for number in range(len(slots))]
    return played


@torch.no_grad()
def forward_gaps(model: Any, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> Gaps:
    """How far the recorded logprobs are from those of a forward pass over each whole sequence in float64,
    within the sets of what filters kept where there are any."""
    gaps = []
    for sequence in sequences:
        ids_1L = torch.tensor(sequence.token_ids.tolist())[None]
        logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0] / temperature
        assert logits_LV.dtype is torch.float64
        is_trained_L = torch.tensor(sequence.is_trained.tolist())[1:]
        logits_NV = logits_LV[:-1][is_trained_L]
        for n, ids in enumerate(sequence.kept or ()):
            outside_V = torch.ones(logits_NV.shape[1], dtype=torch.bool)
            outside_V[torch.tensor(ids.tolist())] = False
            logits_NV[n, outside_V] = -torch.inf
        logprob_N = logits_NV.log_softmax(-1).gather(1, ids_1L[0, 1:][is_trained_L, None])[:, 0]
        recorded_N = torch.tensor(sequence.logprobs.tolist())
        assert len(recorded_N) == len(logprob_N) > 0
        gaps.append((logprob_N - recorded_N).abs())
    every = torch.cat(gaps)
    return Gaps(worst=float(every.max()), mean=float(every.square().mean().sqrt()))
