"""Users' environments, of covey's and of TRL's kind, in a process of their own and in this one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import support.environments
from covey.environments.environment_host import start_environments
from covey.environments.protocol import Lost, Opened, Stepped
from covey.rewards.protocol import TrainerState
from covey.rewards.targets import target_of
from covey.types import CallFailure, RewardFault, ToolCall, ToolResult

FOLDER = Path(next(iter(support.environments.__path__)))
STATE = TrainerState(global_step=3)
PROMPT = [{"role": "user", "content": "Hi"}]


def entry(name):
    """`wordle.py:Wordle` with its folder."""
    return f"{FOLDER / name}"


def started(what, **more):
    host, faults = start_environments(
        what, **{"places": 4, "timeout_s": 5.0, "max_result_chars": 200, **more}
    )
    assert faults == []
    return host


def told_by(begin):
    """What a request is told, once."""
    told = []
    begin(told.append)
    end = time.monotonic() + 20
    while not told:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.01)
    (answer,) = told
    return answer


def opened(host, key=0, seed=7, **row):
    return told_by(lambda done: host.open(key, row, seed, done))


def stepped(host, key=0, text="", **call):
    calls = [{"name": "walk", "arguments": call}] if call else []
    turn = {"text": text, "content": text, "tool_calls": calls, "finish": "stop", "number": 0}
    return told_by(lambda done: host.step(key, turn, done))


def called(host, name, key=0, **arguments):
    return told_by(lambda done: host.call(key, ToolCall(name=name, arguments=arguments), done))


def rewarded(host, key=0):
    return told_by(lambda done: host.reward(key, done))


@pytest.fixture
def hosted():
    """`hosted("wordle.py:Wordle")`, closed at the end."""
    hosts = []

    def start(what, **more):
        hosts.append(started(entry(what) if isinstance(what, str) else what, **more))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


# -- TRL's kind --------------------------------------------------------------------------------------------


def test_wordle(hosted):
    host = hosted("wordle.py:Wordle")
    assert (host.name, host.has_step, host.has_reward, host.takes_seed) == ("Wordle", False, True, False)
    first = opened(host, 1, seed=3, prompt=PROMPT, answer="x")
    assert isinstance(first, Opened) and first.messages is None
    assert first.added.startswith("Guess a word of 5 letters.")
    assert [tool["function"]["name"] for tool in first.tools] == ["guess"]
    # Siblings have one seed and begin alike, whatever happened between.
    others = [opened(host, key, seed=3).added for key in (2, 3)]
    assert others == [first.added] * 2
    secret = random.Random(3).choice(["crane", "slate", "house", "mouse"])
    assert called(host, "guess", 1, word=secret).content == "GGGGG"
    assert called(host, "guess", 2, word="zzzzz") == ToolResult(
        name="guess", content="-----", seconds=pytest.approx(0, abs=0.1)
    )
    bad = called(host, "guess", 2, word="abc")
    assert (bad.failure, bad.content) == (CallFailure.RAISED, "Error: ValueError: abc has 3 letters")
    assert called(host, "guess", 2).failure is CallFailure.ARGUMENTS
    assert called(host, "get_reward", 2).failure is CallFailure.UNKNOWN
    assert (rewarded(host, 1), rewarded(host, 2)) == (1.0, 0.0)
    host.release([1])
    time.sleep(0.2)
    assert called(host, "guess", 1, word=secret) == rewarded(host, 1)
    assert "not there any more" in rewarded(host, 1).words


def test_async_methods(hosted):
    host = hosted("wordle.py:Shop", timeout_s=1.0)
    assert (host.has_step, host.has_reward, host.takes_seed) == (False, True, True)
    first = opened(host, 1, seed=5, prompt=PROMPT, budget=10, more="dropped")
    draw = random.Random(5).random()
    assert first.added == [{"type": "text", "text": f"Hi 10 5 {draw}"}]
    assert opened(host, 2, seed=5, prompt=PROMPT, budget=10).added == first.added
    # A column of this name is the data's.
    assert opened(host, 3, seed=5, prompt=PROMPT, budget=10, seed_=1).added == first.added
    assert json.loads(called(host, "buy", 1, item="tea").content) == {"item": "tea", "left": 9}
    late = called(host, "buy", 1, item="tea", seconds=20)
    assert (late.failure, late.content) == (CallFailure.TIMEOUT, "Error: buy() returned nothing within 1 s")
    assert called(host, "buy", 1, item="tea").failure is None
    assert rewarded(host, 1) == 0.8
    host.release([3])
    lost = opened(host, 4, seed=5, prompt=PROMPT)
    assert isinstance(lost, Lost) and "Shop.reset(): TypeError" in lost.words and "budget" in lost.words


def test_an_async_method_that_blocks_ends_the_process(hosted):
    host = hosted("wordle.py:Shop", timeout_s=0.5)
    opened(host, 1, prompt=PROMPT, budget=10)
    assert called(host, "stare", 1).failure is CallFailure.TIMEOUT
    time.sleep(1.2)
    lost = called(host, "buy", 1, item="tea")
    assert lost.words.startswith("the process of the environments: an async method kept the event loop busy")
    host.release([1])
    assert isinstance(opened(host, 2, prompt=PROMPT, budget=10), Opened)


def test_a_row_that_cannot_be_sent_is_lost(hosted):
    host = hosted("wordle.py:Wordle")
    assert opened(host, 1, picture=b"png").words.endswith("could not be sent: it contains a builtins.bytes")


def test_many_at_a_time_begin_alike(hosted):
    """Resets run one at a time, so that each draws from its own seed; calls run side by side."""
    host = hosted("wordle.py:Shop", places=16)
    with ThreadPoolExecutor(16) as threads:
        asked = [
            threads.submit(opened, host, key, seed=key % 4, prompt=PROMPT, budget=10) for key in range(16)
        ]
        texts = [future.result().added[0]["text"] for future in asked]
        assert texts == [f"Hi 10 {key % 4} {random.Random(key % 4).random()}" for key in range(16)]
        began = time.monotonic()
        calls = [threads.submit(called, host, "buy", key, item="tea", seconds=0.5) for key in range(16)]
        assert [json.loads(call.result().content)["left"] for call in calls] == [9] * 16
    assert time.monotonic() - began < 2


def test_open_waits_for_a_place(hosted):
    host = hosted("wordle.py:Wordle", places=2)
    told = {key: [] for key in range(5)}
    for key in told:
        host.open(key, {}, 1, told[key].append)
    time.sleep(1.0)
    assert [len(answers) for answers in told.values()] == [1, 1, 0, 0, 0]
    host.release([0, 3])
    time.sleep(0.3)
    assert [len(answers) for answers in told.values()] == [1, 1, 1, 1, 0]
    assert told[3] == [Lost(words="the environment was released before it was opened")]
    host.close()
    assert [len(answers) for answers in told.values()] == [1] * 5
    assert isinstance(told[4][0], Lost)


def test_rows_choose_an_environment(hosted):
    host = hosted({"word": entry("wordle.py:Wordle"), "shop": entry("wordle.py:Shop")})
    assert (host.name, host.has_reward, host.takes_seed) == ("word+shop", True, True)
    assert opened(host, 1, environment="word").tools[0]["function"]["name"] == "guess"
    shop = opened(host, 2, environment="shop", prompt=PROMPT, budget=3)
    assert shop.tools[0]["function"]["name"] == "buy"
    assert opened(host, 3, environment="zoo").words == (
        "the column `environment` of the row is 'zoo'; the environments are: word, shop"
    )


# -- covey's kind ------------------------------------------------------------------------------------------


def test_maze(hosted):
    host = hosted("maze.py:Maze")
    assert (host.name, host.has_step, host.has_reward, host.takes_seed) == ("Maze", True, False, True)
    first = opened(host, 1, seed=11, goal=4)
    luck = random.Random(11).random()
    assert first.messages == ({"role": "user", "content": f"Walk to 4. Luck: {luck}"},)
    assert [tool["function"]["name"] for tool in first.tools] == ["walk"]
    at_1 = ({"role": "tool", "content": "At 1."},)
    assert stepped(host, 1, "plain", steps=1) == Stepped(messages=at_1)
    assert stepped(host, 1, "pair") == Stepped(messages=at_1)
    assert stepped(host, 1) == Stepped(messages=at_1, reward=0.25)
    assert stepped(host, 1, "object") == Stepped(messages=at_1, is_done=True, reward=0.25)
    assert stepped(host, 1, "end") == Stepped(is_done=True)
    assert rewarded(host, 1) is None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "Bad.{method}(): KeyError: 'gold' (maze.py, line N: raise KeyError(\"gold\"))"),
        ("five", "Bad.{method}() returned 5 where messages"),
        ("strings", "Bad.{method}() returned 'a' where messages, each an object with a role"),
        ("bytes", "what the environment returned cannot be passed on: it contains a builtins.bytes"),
        ("leave", "Bad.{method}(): SystemExit: 3 (maze.py, line N: sys.exit(3))"),
        ("keys", "Bad.{method}() returned {{'message': 'x'}} where messages"),
        ("nan", "Bad.{method}() returned "),
    ],
)
def test_environments_that_fail(how, words, bad):
    for method, answer in (
        ("reset", opened(bad, 1, how=how)),
        ("step", [opened(bad, 2), stepped(bad, 2, how)][1]),
    ):
        assert isinstance(answer, Lost)
        assert re.sub(r"line \d+", "line N", answer.words).startswith(words.format(method=method))
    bad.release([1, 2])


@pytest.fixture(scope="module")
def bad():
    host = started(entry("maze.py:Bad"), timeout_s=5.0)
    yield host
    host.close()


def test_a_step_that_returns_nothing_is_lost(bad):
    opened(bad, 1)
    assert stepped(bad, 1, "nothing").words.startswith("Bad.step() returned None where messages; with them")
    bad.release([1])


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_an_environment_that_lasts_is_lost_alone(hosted, how):
    host = hosted("maze.py:Bad", timeout_s=0.5)
    opened(host, 1)
    began = time.monotonic()
    assert opened(host, 2, how=how).words == "Bad.reset() returned nothing within 0.5 s"
    assert stepped(host, 1, how).words == "Bad.step() returned nothing within 0.5 s"
    assert time.monotonic() - began < 2.5
    # The lock of resets is free again, and other environments go on.
    assert isinstance(opened(host, 3), Opened)
    assert stepped(host, 3, "fine").messages[0]["content"] == "fine"


def test_a_process_that_ends_takes_its_environments_along(hosted):
    host = hosted("maze.py:Bad")
    opened(host, 1)
    pid = stepped(host, 1, "pid").messages[0]["content"]
    assert int(pid) in host.pids
    opened(host, 2)
    died = stepped(host, 2, "die")
    words = "the process of the environments: ended the worker process with exit code 5"
    assert died.words == words
    assert stepped(host, 1, "fine").words == words
    host.release([1, 2])
    assert isinstance(opened(host, 3), Opened)
    assert stepped(host, 3, "pid").messages[0]["content"] != pid


def test_c_code_that_holds_the_interpreter_is_ended(hosted, monkeypatch):
    host = hosted("maze.py:Bad", timeout_s=0.5)
    opened(host, 1)
    began = time.monotonic()
    assert isinstance(stepped(host, 1, "hold"), Lost)
    assert time.monotonic() - began < 8
    host.release([1])
    assert isinstance(opened(host, 2), Opened)


def test_close_answers_what_runs():
    host = started(entry("maze.py:Bad"), timeout_s=30.0)
    opened(host, 1)
    told = []
    host.step(1, {"text": "spin"}, told.append)
    time.sleep(0.2)
    began = time.monotonic()
    pids = host.pids
    host.close()
    assert time.monotonic() - began < 7
    assert [type(answer) for answer in told] == [Lost]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert isinstance(opened(host, 2), Lost)


# -- before the run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds", "words"),
    [
        ("Absent", ["missing"], "maze.py does not define Absent"),
        ("Raises", ["environment"], "Raises() raised OSError: no server at port 80 (maze.py, line"),
        ("NoReset", ["environment"], "NoReset has no method `reset`"),
        ("NoHints", ["no_hints", "no_docstring"], "the method first of NoHints is a tool of the model, but"),
        ("WantsMore", ["environment"] * 2, "WantsMore.reset demands difficulty, but it is called as"),
        ("ByPosition", ["environment"], "a method of ByPosition takes row only by position"),
    ],
)
def test_faults(name, kinds, words):
    host, faults = start_environments(entry(f"maze.py:{name}"), places=1, timeout_s=1.0, max_result_chars=100)
    assert host is None
    assert [fault.kind for fault in faults] == kinds
    assert faults[0].words.startswith(words)
    assert faults[0].entry == entry(f"maze.py:{name}")


def test_kinds_do_not_mix():
    entries = {"a": entry("maze.py:Maze"), "b": entry("wordle.py:Wordle")}
    host, faults = start_environments(entries, places=1, timeout_s=1.0, max_result_chars=100)
    assert host is None and [fault.kind for fault in faults] == ["environment"]
    host, faults = start_environments("maze", places=1, timeout_s=1.0, max_result_chars=100)
    assert host is None and [fault.kind for fault in faults] == ["missing"]


# -- rewards that look at environments ---------------------------------------------------------------------


def test_rewards_get_the_environments(hosted):
    host = hosted("wordle.py:Wordle")
    seen = host.load_reward(target_of(entry("wordle.py:seen")))
    assert (seen.number, seen.is_orm) == (0, False)
    assert seen.wants.names == ("environments", "prompts", "log_metric") and seen.wants.takes_all
    for key in (1, 2):
        opened(host, key, seed=1)
    called(host, "guess", 2, word="crane")
    reply = host.call_reward(0, {"prompts": ["a", "bb"]}, [1, 2], STATE, 2.0).result(5)
    assert [row[0] for row in reply["rows"]] == [1.0, 3.0]
    assert reply["metrics"] == {"environments": [2.0]}
    for name, words in (("slow", "returned nothing within 0.5 s"), ("wrong", "AttributeError: 'Wordle'")):
        loaded = host.load_reward(target_of(entry(f"wordle.py:{name}")))
        reply = host.call_reward(loaded.number, {"completions": ["a"]}, [1], STATE, 0.5).result(5)
        assert reply.get("failed", reply.get("raised")).startswith(words)
    assert isinstance(host.load_reward(target_of(entry("wordle.py:absent"))), RewardFault)
    assert isinstance(host.load_reward(lambda environments: []), RewardFault)
    reply = host.call_reward(0, {"prompts": ["a"]}, [9], STATE, 2.0).result(5)
    assert reply["failed"] == "was not called, because the environment of a completion is gone"


def test_an_async_reward_runs_on_the_loop_of_the_environments(hosted):
    host = hosted("wordle.py:Shop")
    loaded = host.load_reward(target_of(entry("wordle.py:budgets")))
    opened(host, 1, prompt=PROMPT, budget=5)
    reply = host.call_reward(loaded.number, {"completions": ["a"]}, [1], STATE, 2.0).result(5)
    assert [row[0] for row in reply["rows"]] == [4.0]


# -- objects of a program ----------------------------------------------------------------------------------


def test_live_environments(hosted):
    closed = threading.Event()

    class Counter:
        def __init__(self):
            self.count = 0

        async def reset(self, **columns):
            await asyncio.sleep(0)
            self.draws = (random.random(), np.random.random(), torch.rand(1).item())
            return f"{columns} {self.draws}"

        def add(self, n: int) -> int:
            """Add.

            Args:
                n: how much
            """
            if n > 99:
                time.sleep(5)
            self.count += n
            return self.count

        def get_reward(self):
            return self.count

        def close(self):
            closed.set()

    host = hosted(Counter, timeout_s=0.5)
    assert (host.name, host.pids, host.has_reward) == ("Counter", (), True)
    assert closed.wait(2)
    closed.clear()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = opened(host, 1, seed=2, a=1)
    # The generators of the program are what they were.
    draws = (random.random(), np.random.random(), torch.rand(1).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draws == (random.random(), np.random.random(), torch.rand(1).item())
    assert opened(host, 2, seed=2, a=1).added == first.added
    assert called(host, "add", 1, n="3").content == "3"
    assert called(host, "add", 1, n=100).failure is CallFailure.TIMEOUT
    assert called(host, "add", 1, n=1).content == "4"
    assert rewarded(host, 1) == 4.0
    loaded = host.load_reward(lambda environments, **kwargs: [e.count for e in environments])
    reply = host.call_reward(loaded.number, {}, [1, 2], STATE, 2.0).result(5)
    assert [row[0] for row in reply["rows"]] == [4.0, 0.0]
    host.release([1])
    assert closed.wait(2)
    assert os.getpid() > 0
