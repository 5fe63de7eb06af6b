"""Episodes of several turns on ranks that are one engine: the first plays them, the others step with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from covey.activity import Stopped
from covey.data.text import TextCodec
from covey.environments.protocol import Lost
from covey.rollout.scripted import ScriptedEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.rollout.vllm.group import GroupEngine
from covey.types import Completion, Episode, GenerationRequest, Outcome, ToolCall
from support.agents import SCHEMA, episodes_of, plan_of
from support.sums import TURNS, sum_prompts, sums_agents, thinking, tool_agents
from support.threads import on_ranks


class Steps:
    """In the place of `VllmEngine`: a step answers one request with a script."""

    def __init__(self, codec: TextCodec) -> None:
        self._scripted = ScriptedEngine(codec, lambda turn: f"{turn.prompt_id}-{turn.sibling}-{turn.turn}")
        self.capabilities = replace(ScriptedEngine.capabilities, num_ranks=2)
        self.next_id = self.num_computed = self.digest = self.num_steps = 0
        self.after_step: Callable[[], object] = lambda: None

    def submit(self, request: GenerationRequest) -> int:
        self._scripted.submit(request)
        self.next_id += 1
        return self.next_id - 1

    def abort(self, ids: Any) -> None:
        self._scripted.abort([number + 1 for number in ids])

    @property
    def is_busy(self) -> bool:
        return bool(self._scripted._waiting)

    def step(self) -> list[Completion]:
        self.num_steps += 1
        number, request = self._scripted._waiting.pop(0)
        done = self._scripted._answer(number, request)
        self.num_computed += len(done.token_ids)
        self.after_step()
        return [replace(done, request_id=number - 1)]


def on_two(codec: TextCodec, delay: Any, plant: Callable[[Any, Steps], None] | None = None) -> list[Any]:
    """The episodes of each of two ranks, and the steps that it took; the first one has all slots."""
    prompts = sum_prompts(codec, 3)
    plan: CollectPlan = plan_of(codec, 2)

    def work(comm: Any) -> Any:
        own = Steps(codec)
        if plant is not None:
            plant(comm, own)
        engine = GroupEngine(own, comm)  # type: ignore[arg-type]
        slots = [] if comm.rank else slots_of(prompts, plan)
        agents = sums_agents(codec, delay)
        loop = TurnLoop(slots, engine, codec, agents, comm.activity)
        with comm.activity.stoppable_between_steps():
            found = dict(loop.episodes())
        return found, own.num_steps

    return on_ranks(2, work)


@pytest.mark.parametrize("delay", [None, lambda key, turn: 0.01 * ((key + turn) % 3)], ids=["now", "late"])
def test_the_ranks_step_together_to_the_last_turn(delay: Any, quickstart_codec: TextCodec) -> None:
    (first, steps), (second, same) = on_two(quickstart_codec, delay)
    assert second == {} and steps == same == 6 * TURNS
    episodes: list[Episode] = [first[number] for number in range(6)]
    assert [turn.text for turn in episodes[3].turns] == ["1-1-0", "1-1-1", "1-1-2"]
    assert {len(episode.turns) for episode in episodes} == {TURNS}


def test_a_signal_to_one_rank_ends_the_turns_of_both(quickstart_codec: TextCodec) -> None:
    """Also where the first rank waits for answers at that time."""

    def plant(comm: Any, own: Steps) -> None:
        def stop() -> None:
            comm.activity.is_asked_to_stop = comm.rank == 1 and own.num_steps >= 6

        own.after_step = stop

    found = on_two(quickstart_codec, lambda key, turn: 0.05, plant)
    assert all(isinstance(one, Stopped) for one in found), found


def test_no_room_for_a_turn_ends_both(quickstart_codec: TextCodec) -> None:
    """Where no episode has a turn, the first rank meets the other one all the same."""

    def plant(comm: Any, own: Steps) -> None:
        own.capabilities = replace(own.capabilities, context=1)

    (first, steps), (second, same) = on_two(quickstart_codec, None, plant)
    assert len(first) == 6 and second == {} and steps == same == 0


def test_the_first_rank_leaves_at_a_signal_while_it_waits_for_answers(quickstart_codec: TextCodec) -> None:
    """What a tool takes is not waited for."""

    def plant(comm: Any, own: Steps) -> None:
        def stop() -> None:
            comm.activity.is_asked_to_stop = comm.rank == 0 and own.num_steps == 6

        own.after_step = stop

    found = on_two(quickstart_codec, lambda key, turn: 30.0, plant)
    assert all(isinstance(one, Stopped) for one in found), found


def test_results_of_an_episode_that_is_lost_are_not_waited_for(quickstart_codec: TextCodec) -> None:
    """Of two calls side by side one ends the environment, and the other one takes long."""
    codec = thinking(quickstart_codec)
    agents = tool_agents(codec, lambda number, turn: 0.0 if number == 1 else 30.0)
    host: Any = agents.tools
    assert agents.format is not None
    real = host.call

    def call(call: ToolCall, done: Callable[[Any], None]) -> None:
        is_first = host.num_calls == 0
        real(call, lambda result: done(Lost(words="it is gone") if is_first else result))

    host.call = call
    parse = agents.format.parse
    twice = replace(agents.format, parse=lambda text: replace(parse(text), calls=parse(text).calls * 2))
    began = time.monotonic()
    (prompt,) = sum_prompts(codec, 1, tools=[SCHEMA])
    (episode,), _ = episodes_of(codec, prompt, str, replace(agents, format=twice))
    assert episode.outcome is Outcome.INFRASTRUCTURE and episode.failure == "it is gone"
    assert time.monotonic() - began < 15
