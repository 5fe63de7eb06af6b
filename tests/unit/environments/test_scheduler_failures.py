"""Schedulers that fail, and gym environments: what becomes of their trajectories, and that all are closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.data.text import TextCodec, load_codec
from covey.environments.environment_host import HostedEnvironments
from covey.environments.scheduler_host import start_scheduler
from covey.environments.scheduler_room import SchedulerSettings
from covey.quickstart.task import MODEL_DIR
from covey.types import Outcome
from support.schedulers import PLUGIN, Played, play_rows, scheduling
from support.turn_hosts import Failing

Play = Callable[..., Played]
OPENENV = '''"""A stand-in for the client of OpenEnv: an echo that is over with the second step."""

import asyncio

LOG = []


class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done


class GenericEnvClient:
    def __init__(self, base_url):
        self.base_url, self.steps = base_url, 0

    def sync(self):
        return self

    def __enter__(self):
        LOG.append("hello")
        return self

    def __exit__(self, *error):
        LOG.append("bye" if asyncio._get_running_loop() is None else "bye on the loop")

    def reset(self, **given):
        return Result({"url": self.base_url, "given": given, "hung up": LOG.count("bye")})

    def step(self, action):
        self.steps += 1
        return Result({"got": action}, 0.5 if self.steps == 2 else None, self.steps == 2)
'''


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


@pytest.fixture
def host():
    with scheduling() as host:
        yield host


@pytest.fixture
def play(host: HostedEnvironments, codec: TextCodec) -> Play:
    return lambda *rows, **more: play_rows(host, codec, rows=rows, **more)


def prompts_of(played: Played, codec: TextCodec) -> list[str]:
    return [codec.written_out(e.sequences[0].prompt_ids.tolist()) for e in played.episodes]


# -- failures


def test_a_scheduler_that_fails_costs_its_trajectory(play: Play) -> None:
    wrong = {
        "Raises": ({}, "KeyError: 'no such tool' (schedulers.py, line "),
        "Returns": ({"value": 7}, "Each.run() returned 7 instead of a RolloutOutput or a list of them"),
        "Returns at once": ({"value": None}, "Each.run() returned without asking the model for a turn"),
        "Own": ({"mask": [1, 1]}, "step() returned response_loss_mask with 2 entries for 12 tokens"),
        "TrainsNothing": ({}, "Each.run() returned masks that leave no token of the model to train"),
        "Extends": ({"more": {"tools": [{}], "videos": ["a"]}}, "request has tools, videos, which covey "),
        "Exits": ({}, "SystemExit: 3 (schedulers.py, line "),
        "Cancels": ({}, "CancelledError:  (schedulers.py, line "),
        "FailsBeside": ({}, "ValueError: beside (schedulers.py, line "),
        "Configured": (
            {"config": {"max_tokens": "5"}},
            "sets max_tokens to '5' and stop to []; these are ",
        ),
        "Configured 0": ({"config": {"max_tokens": 0}}, "sets max_tokens to 0 and stop to []; these are a "),
        "Configured text": ({"config": {"stop": "six"}}, "sets max_tokens to 4096 and stop to 'six'; these "),
        "StepsNowhere": ({}, "StepsNowhere has neither a method step nor a run of its own"),
    }
    rows = [{"kind": kind.split()[0], **row} for kind, (row, _) in wrong.items()]
    began = time.monotonic()
    *lost, last = play(*rows, {"kind": "Again"}).episodes
    # None of them is told by the time limit.
    assert time.monotonic() - began < 20
    assert last.outcome is Outcome.SCORED
    for episode, (_, words) in zip(lost, wrong.values(), strict=True):
        assert episode.outcome is Outcome.INFRASTRUCTURE and words in episode.failure
        assert episode.sequences == ()


def test_a_hook_that_is_late_costs_its_trajectory(codec: TextCodec) -> None:
    began = time.monotonic()
    with scheduling(timeout_s=0.5) as host:
        played = play_rows(host, codec, rows=[{"kind": "Waits"}, {"kind": "Again"}])
    lost, other = played.episodes
    assert lost.failure == "Each.run() returned nothing within 0.5 s"
    assert (lost.outcome, other.outcome) == (Outcome.INFRASTRUCTURE, Outcome.SCORED)
    assert time.monotonic() - began < 10


def test_one_that_cannot_be_cancelled_lets_others_begin(codec: TextCodec) -> None:
    with scheduling(timeout_s=0.5) as host:
        lost, other = play_rows(host, codec, rows=[{"kind": "Stubborn"}, {"kind": "Again"}]).episodes
    assert lost.failure == "Each.run() returned nothing within 0.5 s"
    assert other.outcome is Outcome.SCORED


def test_a_release_is_told_while_others_wait_to_begin(codec: TextCodec) -> None:
    """Each begins after the one before: the first one keeps the others waiting."""
    with scheduling(timeout_s=30.0) as host:
        released = [threading.Event() for _ in range(3)]
        for key in range(3):
            host.open(key, {"kind": "Stubborn" if key == 0 else "Again"}, 1, lambda answer: None)
        for key in (2, 1):
            host._room.release(key, released[key].set)
        assert all(event.wait(10) for event in released[1:])


def test_a_turn_that_nobody_waits_for_is_sampled_before_the_end_is_told(play: Play) -> None:
    """Requests behind the end are not answered."""
    episodes = play({"kind": "AsksOn"}, {"kind": "GivesUp"}).episodes
    assert [e.outcome for e in episodes] == [Outcome.SCORED] * 2
    asked, gave_up = episodes
    assert [turn.num_left_out for turn in asked.turns] == [0, 12]
    assert [turn.num_left_out for turn in gave_up.turns] == [12, 0, 0]


def test_a_hook_that_blocks_ends_the_process_and_later_trajectories_live_in_a_new_one(
    codec: TextCodec,
) -> None:
    with scheduling(timeout_s=0.5) as host:
        first = host.pids
        played = play_rows(host, codec, rows=[{"kind": "Blocks"}, {"kind": "Again", "rounds": 9}])
        assert {episode.outcome for episode in played.episodes} == {Outcome.INFRASTRUCTURE}
        assert played.episodes[0].failure == "Each.run() returned nothing within 0.5 s"
        ends, seen = time.monotonic() + 20, set()
        while (after := play_rows(host, codec).one).outcome is Outcome.INFRASTRUCTURE:
            seen.add(after.failure)
            assert time.monotonic() < ends
        busy = "Each.run() kept the event loop busy, so that its process was ended"
        assert f"the process of the environments: {busy}" in seen
        assert len(host.pids) == 1 and host.pids != first


def test_a_scheduler_that_nobody_registers_is_named() -> None:
    settings = SchedulerSettings(name="gym_schedular", plugins=[PLUGIN], model=str(MODEL_DIR))
    host, (fault,) = start_scheduler(settings, timeout_s=5.0)
    assert host is None and (fault.kind, fault.entry) == ("missing", "gym_schedular")
    assert "multi_turns, which has: Adds, " in fault.words and "math_tip_trick" in fault.words


def test_a_plugin_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import swift.rollout.multi_turn\n1 / 0\n")
    settings = SchedulerSettings(name="gym_scheduler", plugins=[str(tmp_path / "bad.py")])
    host, (fault,) = start_scheduler(settings, timeout_s=5.0)
    assert host is None and fault.kind == "import" and "ZeroDivisionError" in fault.words


# -- gym environments


def gym(**row: Any) -> dict[str, Any]:
    return {"kind": "gym_scheduler", "gym": "counting", **row}


def numbers(turn: Any) -> str:
    return f"{turn.turn + 6}"


def test_an_environment_makes_the_prompt_and_pays_each_turn(play: Play, codec: TextCodec) -> None:
    rows = [gym(env_config={"wanted": 8}), gym(env_config={"wanted": 6})]
    played = play(*rows, siblings=2, script=numbers)
    starts = prompts_of(played, codec)
    assert starts[0] == starts[1] != starts[2] == starts[3]
    begins = "<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nThink of "
    assert all(start.startswith(begins) for start in starts)
    assert [e.environment_reward for e in played.episodes] == [1.5, 1.5, 1.0, 1.0]
    infos = [e.columns["rollout_infos"] for e in played.episodes]
    assert infos[0] == {
        "num_turns": 3,
        "total_reward": 1.5,
        "step_rewards": [0.25, 0.25, 1.0],
        "gym_done": True,
    }
    assert played.episodes[0].turns[0].answer == ({"role": "user", "content": "No, 1."},)
    assert [len(e.turns) for e in played.episodes] == [3, 3, 1, 1]


def test_an_environment_that_is_not_over_is_paid_what_it_has_earned(play: Play) -> None:
    played = play(gym(env_config={"wanted": 99}, most=2), script=numbers)
    assert (played.one.outcome, played.one.environment_reward) == (Outcome.SCORED, 0.5)
    assert played.one.columns["rollout_infos"]["gym_done"] is False


def test_a_subclass_may_make_and_close_the_environment(play: Play) -> None:
    played = play({"kind": "ClosesEarly"}, script=numbers)
    assert (played.one.environment_reward, len(played.one.turns)) == (1.0, 1)
    played = play({"kind": "ClosesEarly"})
    assert (played.one.environment_reward, len(played.one.turns)) == (0.25, 2)


def test_a_row_may_name_its_environment(play: Play, codec: TextCodec) -> None:
    """Methods may be sync."""
    lost, played = play(gym(gym="snake"), gym(env_config={"name": "sync_counting"})).episodes
    words = "there is no gym environment 'snake'; the registry has: counting, math_env, sync_counting"
    assert words in lost.failure
    assert (played.outcome, played.environment_reward) == (Outcome.SCORED, 0.5)


def test_math_env_asks_until_the_answer_is_right(play: Play, codec: TextCodec) -> None:
    row = gym(gym="math_env", problem="What is 3+4?", solution="7", most=3)
    said = ["<answer>6</answer>", r"\boxed{7}"]
    played = play(row, script=lambda turn: said[turn.turn])
    assert (played.one.environment_reward, len(played.one.turns)) == (1.0, 2)
    assert prompts_of(played, codec)[0].endswith(
        "<|im_start|>user\nWhat is 3+4?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_environments_are_closed_however_their_trajectory_ends(play: Play, codec: TextCodec) -> None:
    """At its end, where its step raises, and where the engine is lost while the model is asked."""
    play(gym(), script=numbers)
    (lost,) = play(gym(fails=True)).episodes
    assert "RuntimeError: no board (schedulers.py, line" in lost.failure
    (lost,) = play(gym(), engine=Failing).episodes
    assert lost.outcome is Outcome.INFRASTRUCTURE
    ends = time.monotonic() + 10
    before = 3
    while True:
        # The one that is told how many were closed is closed, too.
        (prompt,) = prompts_of(play(gym(gym="sync_counting")), codec)
        if f"{before} were closed." in prompt:
            break
        before += 1
        assert time.monotonic() < ends


@pytest.mark.parametrize("has_package", [True, False])
def test_openenv(
    has_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: TextCodec
) -> None:
    """Its client blocks, and is called in threads."""
    package = tmp_path / "openenv" / "core"
    package.mkdir(parents=True)
    if has_package:
        (package / "generic_client.py").write_text(OPENENV)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = {"base_url": "http://board:8", "reset_kwargs": {"seed": 3}, "system_message": "Echo."}
    said = ['{"move": 1}', '```json\n{"move": 2}\n```']
    with scheduling("openenv_scheduler", plugins=()) as host:
        played, again = (
            play_rows(host, codec, lambda turn: said[turn.turn], [{"env_config": config}]) for _ in range(2)
        )
    if not has_package:
        assert "No module named 'openenv" in played.one.failure
        return
    assert played.one.environment_reward == 0.5
    assert played.one.columns["rollout_infos"]["step_rewards"] == [0.0, 0.5]
    assert prompts_of(played, codec) == [
        '<|im_start|>system\nEcho.<|im_end|>\n<|im_start|>user\n{"url": "http://board:8", "given": '
        '{"seed": 3}, "hung up": 0}<|im_end|>\n<|im_start|>assistant\n'
    ]
    assert '"hung up": 1' in prompts_of(again, codec)[0]
    assert played.one.turns[0].answer == ({"role": "user", "content": '{"got": {"move": 1}}'},)
