"""`covey replay` plays the episodes of a recorded group again, and names what is not as it was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import covey, flags, read_lines, small, succeed, write_jsonl

TOOLS = '''
import json


def calculate(expression: str) -> str:
    """Compute a product.

    Args:
        expression: As 12*7.
    """
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))
'''
GUESS = '''
import random


class Guess:
    """Asks three times."""

    def reset(self, row, seed):
        self.secret, self.turns = random.Random(seed).randint(1, 9), 0
        return [{"role": "user", "content": f"Guess a number, not {self.secret}."}]

    def step(self, turn):
        self.turns += 1
        said = f"No {self.turns}. Guess again."
        return [{"role": "user", "content": said}], self.turns == 3, float(len(turn["text"]) % 3)
'''
FUNCTION = """
def ask(prompts, trainer):
    found = trainer.generate(prompts, max_tokens=16)
    return {name: [one[name] for one in found] for name in ("prompt_ids", "completion_ids", "logprobs")}
"""
Record = dict[str, Any]


def trained(name: str, **changes: Any) -> None:
    """Run with a checkpoint of each step."""
    options = small("products.jsonl", name, save_steps=1, save_total_limit=9)
    model = {"model": "quickstart-tools", "max_completion_length": 200, "reward_trial": False}
    succeed("train", *flags({**options, **model, **changes}))


WITH_TOOLS = {"tools": ["tools.py:calculate"], "reward_funcs": ["accuracy"]}
WITH_GUESS = {"environment_factory": "guess.py:Guess", "reward_funcs": ["environment"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that calls a tool, one with an environment, and one with it that was
    stopped after two steps of three, and resumed."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "guess.py").write_text(GUESS)
    rows = [{"question": f"What is {n}*{n + 3}?", "answer": str(n * (n + 3))} for n in range(32)]
    write_jsonl(folder / "products.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained("tools", **WITH_TOOLS)
        trained("guess", **WITH_GUESS)
        trained("resumed", max_steps=3, save_steps=2, keep_trainer_state=9, **WITH_GUESS)
        shutil.rmtree("resumed/checkpoint-3")
        again = ("--resume_from_checkpoint", "latest", "--save_steps", "1")
        succeed("train", "resumed/config.yaml", *again)
    return folder


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, which is the working directory."""
    copied = shutil.copytree(runs, tmp_path / "copied")
    monkeypatch.chdir(copied)
    return copied


def replayed(*words: str) -> Record:
    found: Record = json.loads(succeed("replay", *words, "--json").out)
    return found


def change(run: str, rollout: int, change: Callable[[Record], None]) -> None:
    path = Path(run) / "rollouts" / f"rollout-{rollout:06d}.jsonl"
    records = read_lines(path)
    for record in records:
        change(record)
    write_jsonl(path, records)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("run", ["tools", "guess"])
def test_a_sound_run_is_the_same_again(run: str) -> None:
    """Rendered, answered, scored and drawn, each episode of several turns."""
    records = [r for r in read_lines(Path(run) / "rollouts/rollout-000001.jsonl") if r["group"] == 1]
    found = replayed(run, "--rollout", "1", "--group", "1", "--sample")
    assert (found["version"], found["step"], found["notes"], found["num_flips"]) == (1, 1, [], 0)
    assert [one["reward"] for one in found["episodes"]] == [r["reward"] for r in records]
    assert any(len(record["turns"]) > 1 for record in records)
    for one in found["episodes"]:
        assert (one["rendering"], one["environment"]) == ([], [])
        assert one["drawn"]["same"] and one["scored"]["largest"] < 1e-3
    rewards = [one["reward"] for one in found["episodes"]]
    advantages = [one["advantage"] for one in found["episodes"]]
    mean = sum(rewards) / len(rewards)
    assert all((r - mean) * a >= 0 for r, a in zip(rewards, advantages, strict=True))
    assert any(advantages) == (len(set(rewards)) > 1)


@pytest.mark.usefixtures("here")
def test_a_conversation_is_shown_as_a_rehearsal_shows_it() -> None:
    (one, *_) = [r for r in read_lines(Path("guess/rollouts/rollout-000000.jsonl")) if len(r["turns"]) == 3]
    out = succeed("replay", "guess", "--rollout", "0", "--group", str(one["group"])).out
    assert f"rollout 0, group {one['group']} of 0 to 1: 4 completions of step 0" in out
    assert "tools and environment: the same answers" in out and "rendering: the same tokens" in out
    for turn, said in zip(one["turns"], ("No 1.", "No 2."), strict=False):
        assert f"⟦{turn['text']}<|im_end|>⟧\n<|im_start|>user\n{said} Guess again.<|im_end|>" in out


def test_an_environment_that_has_changed_is_named_at_its_turn(here: Path) -> None:
    """The rendering is that of the recorded answers all the same."""
    records = read_lines(Path("guess/rollouts/rollout-000001.jsonl"))
    whole = {(r["group"], r["sibling"]) for r in records if len(r["turns"]) == 3 and r["finish"] == "stop"}
    group, sibling = min(whole)

    def differences() -> list[tuple[str, int | None, str, str]]:
        one = replayed("guess", "--rollout", "1", "--group", str(group))["episodes"][sibling]
        assert one["rendering"] == []
        return [(d["part"], d["turn"], d["recorded"], d["now"]) for d in one["environment"]]

    (here / "guess.py").write_text(GUESS.replace('"No {self.turns}. G', '"No {min(self.turns, 2) - 1}. G'))
    answers = [("answer", n, f"No {n}. Guess again.", f"No {min(n, 2) - 1}. Guess again.") for n in (1, 2, 3)]
    assert differences() == answers
    (here / "guess.py").write_text(GUESS.replace("== 3", "== 2").replace("not {self", "never {self"))
    begin, end, *_ = differences()
    assert begin[0] == "begin" and begin[3] == begin[2].replace("not", "never")
    assert end == ("end", 2, "the episode went on", "the episode ended")


def test_a_tool_that_has_changed_is_named_at_its_turn(here: Path) -> None:
    (here / "tools.py").write_text(TOOLS.replace("* int(right)", "* int(right) + 1"))
    found = [one for group in "01" for one in replayed("tools", "--group", group)["episodes"]]
    records = read_lines(Path("tools/rollouts/rollout-000001.jsonl"))
    told = 0
    for one, record in zip(found, records, strict=True):
        assert one["rendering"] == []
        turns = [n for n, t in enumerate(record["turns"], 1) for r in t["results"] if r["failure"] is None]
        assert [d["turn"] for d in one["environment"]] == turns
        for difference in one["environment"]:
            told += 1
            assert int(difference["now"]) == int(difference["recorded"]) + 1
    assert told


@pytest.mark.usefixtures("here")
def test_a_recorded_token_that_has_changed_is_named() -> None:
    """One that the template wrote, where it stands; one that was sampled, by its turn and its logprob."""
    starts: dict[tuple[int, int], int] = {}

    def written(record: Record) -> None:
        if len(record["turns"]) > 1:
            behind = record["sources"][0][1] + 2
            record["completion_ids"][behind] = 65
            starts[record["group"], record["sibling"]] = len(record["prompt_ids"]) + behind

    change("guess", 1, written)
    (group, sibling), start = min(starts.items())
    one = replayed("guess", "--rollout", "1", "--group", str(group))["episodes"][sibling]
    (difference,) = one["rendering"]
    assert (difference["part"], difference["sequence"], difference["token"]) == ("tokens", 1, start + 1)
    assert difference["recorded"].startswith("b") and difference["now"].startswith("user")

    def sampled(record: Record) -> None:
        record["completion_ids"][0] = 65 if record["completion_ids"][0] != 65 else 66

    change("guess", 0, sampled)
    for one in replayed("guess", "--rollout", "0")["episodes"]:
        assert [(d["part"], d["turn"]) for d in one["rendering"]] == [("text", 1)]
        assert one["scored"]["largest"] > 0.1


@pytest.mark.usefixtures("here")
def test_a_token_that_is_drawn_otherwise_is_named() -> None:
    def other(record: Record) -> None:
        record["completion_ids"][1] = 65 if record["completion_ids"][1] != 65 else 66

    change("tools", 1, other)
    found = replayed("tools", "--rollout", "1", "--sample")
    assert found["num_flips"] == 4
    drawn = found["episodes"][0]["drawn"]
    assert (drawn["same"], drawn["turn"], drawn["token"], drawn["recorded"]) == (False, 1, 2, "b")
    assert drawn["now"] not in ("", "b") and drawn["logprob_gap"] == pytest.approx(0.0, abs=1e-3)
    out = succeed("replay", "tools", "--rollout", "1", "--sample").out
    assert "drawn again: 0 of 4 completions have the same tokens, 4 have others" in out
    assert "drawn again: turn 1, token 2 is" in out


@pytest.mark.usefixtures("here")
def test_an_episode_after_a_resume() -> None:
    """A rollout that was sampled after it, by the weights of its step; the superseded one has gone."""
    assert list(Path("resumed/superseded").rglob("rollout-000002*"))
    found = replayed("resumed", "--rollout", "2", "--sample")
    assert (found["version"], found["step"], found["num_flips"]) == (2, 2, 0)
    for one in found["episodes"]:
        assert (one["rendering"], one["environment"], one["drawn"]["same"]) == ([], [], True)


def test_what_is_gone_is_a_note(here: Path) -> None:
    """Of an environment that answers turns the rendering is replayed from the records."""
    (here / "guess.py").unlink()
    (here / "tools.py").unlink()
    found = replayed("guess", "--rollout", "1")
    assert "guess.py:Guess is not replayed" in found["notes"][0]
    for one in found["episodes"]:
        assert (one["rendering"], one["environment"]) == ([], None)
        assert one["scored"]["largest"] < 1e-3
    found = replayed("tools", "--rollout", "1")
    assert {(one["rendering"], one["environment"]) for one in found["episodes"]} == {(None, None)}
    done = covey("replay", "guess", "--rollout", "1", "--sample")
    assert done.code == 2 and "is not all here: guess.py:Guess is not replayed" in " ".join(done.err.split())


@pytest.mark.usefixtures("here")
def test_weights_of_another_step_score_and_do_not_draw() -> None:
    found = replayed("resumed", "--rollout", "1")
    assert found["step"] in (0, 2) and "--save_steps 1" in " ".join(found["notes"])
    assert replayed("guess", "--rollout", "1", "--checkpoint", "checkpoint-2")["step"] == 2
    done = covey("replay", "resumed", "--rollout", "1", "--sample")
    assert done.code == 2 and "E408" in done.err and "--save_steps 1" in done.err
    said = " ".join(done.err.split())
    assert f"of step 1 sampled group 0, these are of step {found['step']}, and the run has those of" in said


def test_episodes_of_one_turn(here: Path) -> None:
    """What a rollout function made is neither rendered nor answered again."""
    plain: Record = {"model": "quickstart", "reward_funcs": ["accuracy"], "max_completion_length": 24}
    trained("plain", max_steps=1, **plain)
    found = replayed("plain", "--sample")
    for one in found["episodes"]:
        assert (one["rendering"], one["environment"], one["drawn"]["same"]) == ([], None, True)
    (here / "made.py").write_text(FUNCTION)
    trained("made", max_steps=1, rollout_func="made.py:ask", **plain)
    found = replayed("made")
    assert found["notes"][0].startswith("rollout_func made the episodes")
    for one in found["episodes"]:
        assert (one["rendering"], one["environment"]) == (None, None)
        assert one["scored"]["largest"] < 1e-3
    assert covey("replay", "made", "--sample").code == 2


@pytest.mark.usefixtures("here")
def test_all_that_is_wrong_is_named_together() -> None:
    done = covey("replay", "guess", "--rollout", "1", "--group", "7", "--checkpoint", "checkpoint-9")
    assert done.code == 2 and "no group 7" in done.err and "checkpoint-9 is neither" in done.err
    done = covey("replay", "guess", "--rollout", "9", "--checkpoint", "checkpoint-9")
    assert done.code == 2 and "no rollout 9" in done.err and "checkpoint-9 is neither" in done.err
    assert covey("replay", "nowhere").code == covey("replay").code == 2
