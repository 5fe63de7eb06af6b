"""`covey mismatch` names what explains a gap between sampler and learner, planted in the records of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main

REWARD = """
def judge(completions, **kwargs):
    return [float(sum(map(ord, str(c))) % 7) for c in completions]
"""
Record = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each, whose steps are long."""
    folder = tmp_path_factory.mktemp("mismatch")
    (folder / "judge.py").write_text(REWARD)
    words = [
        *(
            "train",
            "--model",
            "quickstart",
            "--dataset",
            "quickstart#32",
            "--output_dir",
            str(folder / "run"),
        ),
        *("--reward_funcs", f"{folder / 'judge.py'}:judge", "--reward_trial", "false", "--top_k", "20"),
        *("--per_device_train_batch_size", "8", "--num_generations", "4", "--max_completion_length", "12"),
        *("--learning_rate", "3e-3", "--max_steps", "3", "--save_steps", "1", "--save_total_limit", "9"),
    ]
    assert main(words) == 0
    return folder / "run"


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Callable[[int, Callable[[Record], Record]], Path]:
    """Gives a copy of the run with other records of one rollout."""

    def make(rollout: int, change: Callable[[Record], Record]) -> Path:
        copied = Path(shutil.copytree(run, tmp_path / "run"))
        path = copied / "rollouts" / f"rollout-{rollout:06d}.jsonl"
        records = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return copied

    return make


def found(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Record:
    capsys.readouterr()
    assert main(["mismatch", str(run), "--json", *words]) == 0
    answer: Record = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("rollout", [0, 1, 2])
def test_a_sound_run_agrees(rollout: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the weights of its own step; every change makes a gap."""
    answer = found(run, capsys, "--rollout", str(rollout))
    assert (answer["version"], answer["is_other_step"], answer["notes"]) == (rollout, False, [])
    own, *others = answer["scores"]
    assert answer["is_rounding"] and own["largest"] < 1e-4 and answer["explained"] == []
    names = {score["changed"] for score in others}
    assert {"without top-p, top-k and min-p", "computed in bfloat16"} <= names
    for score in others:
        if "bfloat16" in score["changed"] or score["changed"].startswith(("without top", "weights of")):
            assert score["mean"] > 10 * own["mean"], score


def test_weights_of_an_earlier_step_are_named(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As of an engine that a publish did not reach."""
    stale = changed(1, lambda r: {**r, "versions": [2] * len(r["versions"])})
    answer = found(stale, capsys, "--rollout", "1")
    assert answer["version"] == 2 and not answer["is_rounding"]
    assert answer["explained"] == ["weights of step 1"]


def test_another_temperature_is_named(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(changed(2, lambda r: {**r, "temperature": 0.6}), capsys)
    assert answer["explained"] == ["temperature 1"]


def test_prompts_that_were_other_tokens_are_named(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def other(record: Record) -> Record:
        ids = record["prompt_ids"]
        return {**record, "prompt_ids": [*ids[:4], 5, 6, 7, *ids[7:]]}

    answer = found(changed(1, other), capsys, "--rollout", "1")
    assert answer["explained"] == ["prompts as their text is encoded now"]


def test_weights_that_are_not_there_are_said(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    copied = changed(1, lambda r: r)
    shutil.rmtree(copied / "checkpoint-1")
    assert found(copied, capsys, "--rollout", "1")["is_other_step"]
    assert main(["mismatch", str(copied), "--rollout", "1"]) == 0
    assert "of another step" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["nowhere"], ["RUN", "--rollout", "7"], []])
def test_what_is_no_rollout_of_a_run(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mismatch", *[str(run) if word == "RUN" else word for word in words]]) == 2
    assert ("E408" if words else "E105") in capsys.readouterr().err
