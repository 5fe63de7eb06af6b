"""Episodes that a scheduler of ms-swift makes in its worker process, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import support.environments
from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.environment_host import HostedEnvironments
from covey.environments.scheduler_host import start_scheduler
from covey.environments.scheduler_room import SchedulerSettings
from covey.quickstart.task import MODEL_DIR
from covey.rollout.scripted import ScriptedEngine
from covey.rollout.slots import slots_of
from covey.rollout.turns import TurnLoop
from covey.types import Completion, Episode, GenerationRequest, Prompt, Source, TokenSequence, TurnId
from support.agents import agents_for, plan_of, prompt_of

PLUGIN = str(Path(next(iter(support.environments.__path__))) / "schedulers.py")
USER = {"role": "user", "content": "What is 2*3?"}
SAMPLING = {
    "max_tokens": 4096,
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "logprobs": True,
    "return_details": True,
}


@contextmanager
def scheduling(
    name: str = "Each", *, timeout_s: float = 30.0, plugins: Sequence[str] = (PLUGIN,), **settings: Any
) -> Iterator[HostedEnvironments]:
    """Start the process of a scheduler."""
    given = {"model": str(MODEL_DIR), "sampling": SAMPLING, **settings}
    host, faults = start_scheduler(
        SchedulerSettings(name=name, plugins=plugins, **given), timeout_s=timeout_s
    )
    assert faults == [] and host is not None
    try:
        yield host
    finally:
        host.close()


@dataclass
class Played:
    """Holds episodes in the order of their slots, the requests of the engine, and what is noted once."""

    episodes: list[Episode]
    requests: list[GenerationRequest]
    notes: list[str]

    @property
    def one(self) -> Episode:
        """The only episode."""
        (episode,) = self.episodes
        return episode


def play_rows(
    host: HostedEnvironments,
    codec: TextCodec,
    script: Callable[[TurnId], str | Completion | None] = lambda turn: f"It is six, {turn.turn}.",
    rows: Sequence[Mapping[str, Any]] = ({"kind": "Again"},),
    *,
    messages: Sequence[Mapping[str, Any]] = (USER,),
    siblings: int = 1,
    prompt: Prompt | None = None,
    engine: Any = ScriptedEngine,
    **limits: Any,
) -> Played:
    """Play an episode for each row of columns, or several; `script` says what the model does."""
    first = prompt_of(codec, messages) if prompt is None else prompt
    prompts = [replace(first, id=3 + number, columns=dict(row)) for number, row in enumerate(rows)]
    slots, scripted = slots_of(prompts, plan_of(codec, siblings)), engine(codec, script)
    agents = replace(agents_for(codec, environment=host, **limits), format=None)
    found = dict(TurnLoop(slots, scripted, codec, agents, Activity()).episodes())
    assert sorted(found) == list(range(len(slots)))
    episodes = [found[number] for number in range(len(slots))]
    for episode in episodes:
        assert_trains_what_was_sampled(episode)
    return Played(episodes, scripted.requests, agents.notes.take())


def assert_trains_what_was_sampled(episode: Episode) -> None:
    """What is trained is the model's, and each of its tokens has a logprob and a version."""
    for sequence in episode.sequences:
        start = 0
        for source, count in sequence.sources:
            if source is not Source.MODEL:
                assert not sequence.is_trained[start : start + count].any()
            start += count
        assert start == len(sequence.token_ids)
        assert len(sequence.logprobs) == sequence.num_trained == sum(n for _, n in sequence.versions)


def shown(codec: TextCodec, sequence: TokenSequence) -> str:
    """Return the tokens of a sequence behind its prompt as text, what is trained between ⟦ and ⟧."""
    parts, is_inside = [], False
    pairs = zip(sequence.token_ids.tolist(), sequence.is_trained.tolist(), strict=True)
    for token, is_trained in list(pairs)[sequence.prompt_length :]:
        if is_trained != is_inside:
            parts.append("⟦" if is_trained else "⟧")
            is_inside = is_trained
        parts.append(codec.written_out([token]))
    return "".join([*parts, "⟧" if is_inside else ""])
