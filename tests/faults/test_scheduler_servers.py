"""Schedulers of ms-swift that run on rollout servers: they make what one of the run makes, also where
servers are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from covey.data.text import TextCodec, load_codec
from covey.environments.agents import Agents, TurnLimits
from covey.environments.rendering import ALL_ALIKE, Renderer
from covey.environments.scheduler_host import hosted, start_scheduler
from covey.environments.scheduler_room import SchedulerSettings
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.call import Caller
from covey.rollout.server.scheduler_client import ServedRooms
from covey.types import Completion, Outcome
from support.servers import Process, policy_of_server, processes
from support.sums import Played, play, sum_prompts

pytestmark = pytest.mark.multi

PLUGIN = """
import asyncio
import os
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, multi_turns

class Count(Env):
    async def reset(self, config):
        self.turn = 0
        return config.messages[-1]["content"], {}, "Answer in digits."
    async def step(self, action):
        self.turn += 1
        return f"Turn {self.turn}: {len(action[-1]['content'])} characters.", 1.0, self.turn == 3, {}
    async def close(self):
        with open(os.path.join(os.path.dirname(__file__), "closed"), "a") as file:
            file.write("x")

class Own(Count):
    async def step(self, action):
        said, *others = await super().step(action)
        return f"{said} {os.getpid()}", *others

class Slow(Count):
    async def reset(self, config):
        await asyncio.sleep(0.5)
        return await super().reset(config)

envs["count"], envs["own"], envs["slow"] = Count, Own, Slow
"""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of_server()


@pytest.fixture
def codec() -> TextCodec:
    return load_codec(task.MODEL_DIR)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Process]]:
    with servers(tmp_path, "count") as found:
        yield found


def servers(folder: Path, env: str, number: int = 2) -> Any:
    (folder / "plugin.py").write_text(PLUGIN)
    words = ("--external_plugins", "plugin.py", "--multi_turn_scheduler", "gym_scheduler", "--gym_env", env)
    return processes(folder, number, *words)


def rooms(found: Sequence[Process], token: str | None = None) -> ServedRooms:
    given = found[0].token if token is None else token
    return ServedRooms([Caller(address=s.address, token=given, timeout_s=20.0) for s in found], {})


def played(
    policy: Policy,
    codec: TextCodec,
    environment: Any,
    on_completion: Callable[[Completion], None] = lambda completion: None,
) -> Played:
    agents = Agents(
        renderer=Renderer(codec, ALL_ALIKE),
        limits=TurnLimits(max_tokens=96, is_per_turn=True, max_turns=5),
        environment=environment,
        keys=count(),
    )
    try:
        prompts = sum_prompts(codec, 4)
        return play(
            NativeEngine(policy), prompts, codec, agents, siblings=2, most=12, on_completion=on_completion
        )
    finally:
        environment.close()


class Kills:
    """Kills servers when so many completions have come; of 24, eight are first turns."""

    def __init__(self, found: Sequence[Process], after: int = 12) -> None:
        self.found, self.left = found, after

    def __call__(self, completion: Completion) -> None:
        self.left -= 1
        if self.left == 0:
            for server in self.found:
                server.kill()


def test_a_server_that_is_killed_in_turn_two_changes_nothing(
    pair: list[Process], policy: Policy, codec: TextCodec, tmp_path: Path
) -> None:
    """Its trajectories begin again on the other one, with the turns that they were given."""
    settings = SchedulerSettings(
        name="gym_scheduler", plugins=(str(tmp_path / "plugin.py"),), gym_env="count"
    )
    own, faults = start_scheduler(settings, timeout_s=10.0)
    assert own is not None, faults
    expected = played(policy, codec, own)
    assert {episode.outcome for episode in expected.episodes} <= {Outcome.SCORED, Outcome.TRUNCATED}
    assert {len(episode.turns) for episode in expected.episodes} == {3}
    assert [e.environment_reward for e in expected.episodes] == [3.0] * 8

    found = played(policy, codec, hosted(rooms(pair), "gym_scheduler"))
    assert found.tokens == expected.tokens and found.texts == expected.texts
    again = played(policy, codec, hosted(rooms(pair), "gym_scheduler"), Kills(pair[:1]))
    assert again.tokens == expected.tokens and again.texts == expected.texts
    assert [e.environment_reward for e in again.episodes] == [3.0] * 8


def test_without_a_server_trajectories_are_lost(
    pair: list[Process], policy: Policy, codec: TextCodec
) -> None:
    found = played(policy, codec, hosted(rooms(pair), "gym_scheduler"), Kills(pair))
    lost = [e for e in found.episodes if e.outcome is Outcome.INFRASTRUCTURE]
    assert lost and all("the scheduler of http" in episode.failure for episode in lost)


def test_a_trajectory_that_another_server_plays_otherwise_is_lost(
    policy: Policy, codec: TextCodec, tmp_path: Path
) -> None:
    with servers(tmp_path, "own") as pair:
        found = played(policy, codec, hosted(rooms(pair), "gym_scheduler"), Kills(pair[:1]))
    kinds = {episode.outcome for episode in found.episodes}
    lost = [e for e in found.episodes if e.outcome is Outcome.INFRASTRUCTURE]
    assert len(kinds) > 1 and lost
    assert all("plays it in another way" in episode.failure for episode in lost)


def test_a_trajectory_may_begin_later_than_a_server_may_be_silent(
    policy: Policy, codec: TextCodec, tmp_path: Path
) -> None:
    """Of eight that begin one after the other, the last ones wait for the others."""
    with servers(tmp_path, "slow", 1) as found:
        client = ServedRooms([Caller(address=found[0].address, token=found[0].token, timeout_s=2.0)], {})
        slow = played(policy, codec, hosted(client, "gym_scheduler"))
    assert not [episode.failure for episode in slow.episodes if episode.failure]


def test_trajectories_of_a_client_that_is_gone_are_released(tmp_path: Path) -> None:
    with servers(tmp_path, "count", 1) as found:
        (server,) = found
        told: list[Any] = []
        client = rooms(found)
        row = {"prompt": [{"role": "user", "content": "?"}], "question": "?"}
        client.open(0, row, 1, told.append)
        until = time.monotonic() + 20
        while not told and time.monotonic() < until:
            time.sleep(0.05)
        assert told[0].messages[-1] == {"role": "user", "content": "?"}
        client.close()
        while not (tmp_path / "closed").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert (tmp_path / "closed").read_text() == "x"
        refused: list[Any] = []
        stranger = rooms(found, "another-token")
        stranger.open(0, row, 1, refused.append)
        while not refused and time.monotonic() < until:
            time.sleep(0.05)
        stranger.close()
        assert "401" in refused[0].words or "token" in refused[0].words
        assert server.code is None
