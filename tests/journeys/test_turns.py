"""Runs whose episodes have several turns, with tools and environments that fail in every way."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.data.text import load_codec
from covey.environments.template_calls import format_of
from covey.meeting import started
from covey.quickstart.task import MODEL_DIR
from covey.rollout.engine import Capabilities
from covey.rollout.scripted import ScriptedEngine
from covey.training import build
from covey.types import ToolCall, TurnId
from journeys.helpers import (
    Done,
    completions,
    covey,
    events,
    flags,
    metrics,
    rollouts,
    small,
    tensors,
)

TOOLS = '''"""Tools that fail."""

import os
import signal
import subprocess
import time


def work(how: str) -> str:
    """Do as it says.

    Args:
        how: What to do.
    """
    match how:
        case "hang":
            time.sleep(600)
        case "raise":
            raise ValueError("no such city")
        case "fork":
            child = subprocess.Popen(["sleep", "600"])
            return f"pid {child.pid}"
        case "print":
            print("x" * 20_000_000)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "long":
            return "y" * 5_000_000
    return f"did {how}"
'''
ENVIRONMENTS = '''"""Environments that fail."""

import os
import random
import time


class Sums:
    """Ends with the second turn."""

    resets = 0

    def reset(self, row, seed):
        Sums.resets += 1
        self.number = Sums.resets
        return row["prompt"]

    def step(self, turn):
        return row_of("Again?"), turn["number"] == 1, float(len(turn["text"]) % 3)


def row_of(text):
    return [{"role": "user", "content": text}]


class NeverEnds(Sums):
    def step(self, turn):
        return row_of("Again?"), False, 0.5


class RaisesOnce(Sums):
    def reset(self, row, seed):
        prompt = super().reset(row, seed)
        if self.number == 3:
            raise ConnectionError("no sandbox is free")
        return prompt


class Raises(Sums):
    def reset(self, row, seed):
        raise KeyError("gold")


class HangsOnce(Sums):
    def step(self, turn):
        if self.number == 3:
            time.sleep(600)
        return super().step(turn)


class Hangs(Sums):
    def step(self, turn):
        time.sleep(600)


class Spins(Sums):
    def reset(self, row, seed):
        prompt = super().reset(row, seed)
        while self.number == 3:
            pass
        return prompt


class Dies(Sums):
    def step(self, turn):
        os._exit(7)


class Wrong(Sums):
    def step(self, turn):
        return {"reply": "Again?"}


class Differs(Sums):
    def reset(self, row, seed):
        return row_of(f"Guess {os.urandom(2).hex()}.")


class Seeded(Sums):
    def reset(self, row, seed):
        return row_of(f"Guess {random.random()} {seed}.")
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return tmp_path


def trained(name: str, **changes: Any) -> Done:
    """A run of one step in an environment: 2 prompts x 8 completions. It is not rehearsed, since that finds
    before the run what fails always."""
    options = small(
        "quickstart#64",
        "run",
        environment_factory=f"envs.py:{name}",
        reward_funcs=["environment"],
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=64,
        max_steps=1,
        tool_timeout_s=1.0,
        reward_trial=False,
    )
    return covey("train", *flags({**options, **changes}))


def ends_of(done: Done) -> dict[str, int]:
    """How the completions of a run ended; it went well."""
    assert done.code == 0, done.err
    (line,) = metrics(Path("run"))
    return {n.partition("/")[2]: v for n, v in line.items() if n.startswith("outcome/") and v}


def seen_in(done: Done, code: str) -> str:
    """What a run that a guard stopped says it has seen, on one line."""
    assert done.code == 3, done.err
    said = re.search(rf"^{code} .*?  seen   (.*?)\n  why", done.err, re.DOTALL | re.MULTILINE)
    assert said is not None, done.err
    assert "Traceback" not in done.err
    (event,) = [e for e in events(Path("run"), "finding") if e["code"] == code]
    words = " ".join(said[1].split())
    assert " ".join(event["seen"].split()) in words
    return words


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("Raises", "E393", "Raises.reset(): KeyError: 'gold' (envs.py, line"),
        ("Hangs", "E393", "Hangs.step() returned nothing within 1 s"),
        ("Dies", "E393", "ended the worker process with exit code 7"),
    ],
)
def test_the_rehearsal_refuses_what_fails_always(name: str, code: str, words: str) -> None:
    done = trained(name, reward_trial=True)
    assert done.code == 2 and f"{code} environment_factory" in done.err
    assert words in " ".join(done.err.split()) and not Path("run").exists()


# -- tools

CODEC = load_codec(MODEL_DIR, chat_template="chatml-tools")
HOW = ("fine", "hang", "raise", "fork", "print", "kill", "long", "odd")


class Calling(ScriptedEngine):
    """A model whose siblings call the tool in eight ways, and then answer."""

    capabilities = Capabilities(logprobs=True, noise_keys=True, swaps=True)

    def __init__(self) -> None:
        super().__init__(CODEC, _said)


def _said(turn: TurnId) -> str:
    form = format_of(CODEC)
    assert form is not None
    if turn.turn:
        return f"Six, {turn.sibling}."
    how = HOW[turn.sibling]
    call = ToolCall(name="work", arguments={"what": 5} if how == "odd" else {"how": how})
    return form.write([call])


@pytest.mark.usefixtures("here")
def test_a_tool_that_fails_is_answered_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is told what went wrong; nothing that a tool has started is left."""
    monkeypatch.setattr(build, "sampling_engine", lambda *args: Calling())
    options = small(
        "quickstart#64",
        "run",
        tools=["tools.py:work"],
        chat_template="chatml-tools",
        num_generations=8,
        per_device_train_batch_size=8,
        max_completion_length=1000,
        max_tool_response_length=100,
        tool_timeout_s=1.0,
        max_steps=1,
        guards=False,
    )
    began = time.monotonic()
    done = covey("train", *flags(options))
    assert done.code == 0, done.err
    assert time.monotonic() - began < 60
    (records,) = rollouts(Path("run"))
    results = {HOW[r["sibling"]]: r["turns"][0]["results"][0] for r in records}
    assert {how: result["failure"] for how, result in results.items()} == {
        "fine": None,
        "hang": "timeout",
        "raise": "raised",
        "fork": None,
        "print": None,
        "kill": "ended",
        "long": None,
        "odd": "arguments",
    }
    said = {how: result["content"] for how, result in results.items()}
    assert said["fine"] == "did fine"
    assert said["hang"] == "Error: work() returned nothing within 1 s"
    assert said["raise"] == "Error: ValueError: no such city"
    assert said["print"] == "did print"
    assert said["kill"].startswith("Error: work(): the worker process was killed by SIGKILL")
    assert "how" in said["odd"]
    long = next(r for r in records if HOW[r["sibling"]] == "long")
    assert len(long["turns"][0]["answer"][0]["content"]) < 1000
    pid = int(said["fork"].removeprefix("pid "))
    assert started(pid) is None
    (line,) = metrics(Path("run"))
    assert (line["tools/call_frequency"], line["tools/failure_frequency"]) == (1.0, 0.5)
    assert line["num_turns"] == 2.0 and line["outcome/scored"] == 8
    assert "[what else this worker process prints is not shown]" in done.out + done.err
    assert len(done.out + done.err) < 1_000_000


# -- environments


@pytest.mark.usefixtures("here")
def test_an_environment_that_never_ends() -> None:
    assert ends_of(trained("NeverEnds", max_turns=2)) == {"policy_failure": 16}
    (records,) = rollouts(Path("run"))
    assert {len(r["turns"]) for r in records} == {2}
    assert {r["reward"] for r in records} == {1.0}


@pytest.mark.usefixtures("here")
def test_without_a_limit_of_turns_that_of_the_tokens_ends_it() -> None:
    assert ends_of(trained("NeverEnds")) == {"truncated": 16}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RaisesOnce", "RaisesOnce.reset(): ConnectionError: no sandbox is free (envs.py, line"),
        ("HangsOnce", "HangsOnce.step() returned nothing within 1 s"),
        ("Spins", "Spins.reset() returned nothing within 1 s"),
    ],
)
def test_one_environment_that_is_lost_costs_one_completion(name: str, words: str) -> None:
    done = trained(name)
    ended = ends_of(done)
    assert ended["infrastructure"] == 1
    (records,) = rollouts(Path("run"))
    (lost,) = [r for r in records if r["finish"] == "infrastructure"]
    assert lost["failure"].startswith(words)
    assert lost["reward"] is None and lost["completion_ids"] == []
    assert all(
        r["reward"] is not None for r in records if r is not lost and r["turns"][0]["reward"] is not None
    )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", "16 of 16 completions were lost: 16 × Raises.reset(): KeyError: 'gold' (envs.py, line"),
        ("Hangs", "16 × Hangs.step() returned nothing within 1 s"),
        ("Wrong", "Wrong.step() returned {'reply': 'Again?'} where messages;"),
        ("Dies", "the process of the environments: ended the worker process with exit code 7"),
    ],
)
def test_environments_that_are_all_lost_stop_the_run(name: str, words: str) -> None:
    began = time.monotonic()
    done = trained(name)
    assert words in seen_in(done, "F138")
    assert time.monotonic() - began < 30
    assert "--resume_from_checkpoint auto" in done.err


@pytest.mark.usefixtures("here")
def test_episodes_of_a_group_that_begin_differently_stop_the_run() -> None:
    done = trained("Differs")
    assert seen_in(done, "F143") == "step 1: the 8 episodes of group 0 began in 8 different ways."
    text = " ".join(done.err.split())
    assert "GRPO compares the rewards of a group." in text
    assert "reset() of the environment, or a scheduler before its first request, draws random numbers" in text
    assert "--environment_starts differ" in text and "report this" not in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("more", [{}, {"beta": 0.1, "num_iterations": 2}])
def test_episodes_of_a_group_may_begin_differently_where_that_is_asked_for(more: dict[str, Any]) -> None:
    """Each is trained behind the prompt that it was sampled behind."""
    assert sum(ends_of(trained("Differs", environment_starts="differ", **more)).values()) == 16
    (records,) = rollouts(Path("run"))
    assert len({r["prompt"] for r in records}) == 16


@pytest.mark.usefixtures("here")
def test_seeded_environments_begin_alike_in_each_group() -> None:
    assert sum(ends_of(trained("Seeded")).values()) == 16
    (records,) = rollouts(Path("run"))
    starts = {(r["group"], r["prompt"]) for r in records}
    assert len(starts) == 2 and len({prompt for _, prompt in starts}) == 2


@pytest.mark.usefixtures("here")
def test_a_resumed_run_draws_the_same_turns() -> None:
    """And trains them to the same weights. The sampler's logprobs are equal up to rounding: which turns
    decode side by side depends on when environments answer."""
    steps = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3}
    ends = [trained("Sums", output_dir="whole", **steps)]
    ends += [trained("Sums", output_dir="cut", stop_after_steps=2, **steps)]
    ends += [trained("Sums", output_dir="cut", resume_from_checkpoint="latest", **steps)]
    assert [done.code for done in ends] == [0, 0, 0]
    assert completions(Path("whole")) == completions(Path("cut"))
    one, other = (tensors(Path(run) / "checkpoint-4") for run in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    for whole, cut in zip(metrics(Path("whole")), metrics(Path("cut")), strict=True):
        assert {n: v for n, v in whole.items() if isinstance(v, int | float)} == pytest.approx(
            {n: v for n, v in cut.items() if isinstance(v, int | float)}, abs=1e-5
        )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["Sums", "Differs"])
def test_turns_are_replayed_without_their_environment(name: str) -> None:
    """Also those of episodes that began differently."""
    assert trained(name, environment_starts="differ").code == 0
    options = small(
        "quickstart#64",
        "again",
        replay_rollouts="run/rollouts",
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=64,
        max_steps=1,
    )
    done = covey("train", *flags(options))
    assert done.code == 0, done.err
    first, second = (metrics(Path(run))[0] for run in ("run", "again"))
    for key in ("reward", "num_turns", "completions/mean_length", "outcome/scored"):
        assert first[key] == second[key]
    for key in ("loss", "grad_norm", "entropy"):
        assert first[key] == pytest.approx(second[key], rel=1e-4)
