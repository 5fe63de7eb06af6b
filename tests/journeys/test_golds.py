"""Golds that are lists and objects, from the file to the rewards of a run, its evaluation and a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.rewards.accuracy import accuracy
from journeys.helpers import covey, flags, rollouts, rows, small, succeed, write_jsonl

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_golds(make: Callable[[str, int], Any], name: str = "solution", count: int = 8) -> list[Row]:
    """Rows whose gold is made of the right answer and the number of the row."""
    return [{"question": row["question"], name: make(row["answer"], n)} for n, row in enumerate(rows(count))]


def scores(run: Path) -> list[tuple[str, Any, float]]:
    """Text, gold and accuracy of each completion of a run."""
    records = [record for step in rollouts(run) for record in step]
    return [(r["text"], r["columns"]["solution"], r["parts"][0]["value"]) for r in records]


def said_of_golds(*words: str) -> list[str]:
    """The lines of a plan on golds."""
    options = small("d.jsonl", "run", reward_funcs=["accuracy"])
    lines = succeed("plan", *flags(options), *words).out.splitlines()
    return [text.strip() for text in lines if "gold " in text]


def refused(*words: str) -> list[str]:
    """The codes of what is wrong."""
    done = covey("plan", *flags(small("d.jsonl", "run", reward_funcs=["accuracy"])), *words)
    assert done.code == 2
    return [line.split()[0] for line in done.err.splitlines() if line.startswith("E")]


def test_lists_are_taken_as_the_option_says_in_a_run_and_its_resume(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), with_golds(lambda gold, n: [gold, f"word {n}"]))
    given = {"reward_funcs": ["accuracy"], "max_steps": 1}
    for lists in ("any", "all"):
        succeed("train", *flags(small("d.jsonl", lists, **given)), "--gold_lists", lists)
        texts, golds, values = zip(*scores(tmp_path / lists), strict=True)
        assert list(values) == accuracy(completions=texts, solution=golds, gold_lists=lists)
        assert (sum(values) > 0) is (lists == "any")
    # What a list is changes rewards: a resume may not change it in passing.
    words = flags(small("d.jsonl", "any", reward_funcs=["accuracy"]))
    done = covey("train", *words, "--gold_lists", "all", "--resume_from_checkpoint", "true")
    assert done.code == 2 and "gold_lists" in done.err
    succeed("train", *words, "--gold_lists", "any", "--resume_from_checkpoint", "true")
    assert len(rollouts(tmp_path / "any")) == 2


READ = "gold answers: 8 of 8 can be read"
ANY = "gold lists: 8, one member is enough (gold_lists any)"
NAMED = "gold objects: 8 with several answers, one is enough"


@pytest.mark.parametrize(
    ("make", "name", "words", "said"),
    [
        (lambda gold, n: [gold], "solution", [], [READ]),
        (lambda gold, n: [gold, "many"], "answer", [], [READ, ANY]),
        (lambda gold, n: [gold, f"{gold}.0"], "solution", [], [READ, ANY]),
        # By the name of their column, before and after it is renamed.
        (lambda gold, n: [gold, "0"], "golden_answers", ["--columns", '{"golden_answers": "solution"}'],
         [READ, ANY]),
        (lambda gold, n: [gold, "0"], "targets", [], [READ, ANY, "gold answers: the column targets"]),
        (lambda gold, n: {"text": [gold, "0"], "answer_start": [1, 2]}, "answers", [],
         [READ, NAMED, "gold answers: the column answers"]),
        (lambda gold, n: {"value": gold, "aliases": ["0"], "type": "number"}, "answer", [], [READ, NAMED]),
        (lambda gold, n: {"style": "rule", "ground_truth": {"target": [gold, "many"]}}, "reward_model", [],
         [READ, ANY, "gold answers: ground_truth in the column reward_model"]),
        (lambda gold, n: ["A", "C"], "solution", ["--gold_lists", "all"],
         [READ, "gold lists: 8, all members are needed (gold_lists all)"]),
        (lambda gold, n: [["A", "C"], "B"], "solution", ["--gold_lists", "any"], [READ, ANY]),
        (lambda gold, n: [gold, "many"], "solution", ["--streaming", "true"],
         ["gold answers: 8 of the first 8 can be read", ANY]),
    ],
)  # fmt: skip
def test_what_the_plan_takes_a_column_for(
    make: Callable[[str, int], Any], name: str, words: list[str], said: list[str]
) -> None:
    write_jsonl(Path("d.jsonl"), with_golds(make, name))
    lines = said_of_golds(*words)
    assert [line.removeprefix("data      ") for line in lines] == said


def test_what_is_refused_and_what_mends_it() -> None:
    letters = with_golds(lambda gold, n: ["A", "C"])
    write_jsonl(Path("d.jsonl"), letters)
    assert refused() == refused("--streaming", "true") == ["E366"]
    assert refused("--reward_funcs", "cosine") == ["E366"]
    for lists in ("any", "all"):
        assert said_of_golds("--gold_lists", lists)[0].endswith(READ)
    # A reward that reads no gold does not ask.
    succeed("plan", *flags(small("d.jsonl", "run", reward_funcs=["format"])))
    # A set to evaluate on, and a task, are each looked at by themselves.
    words = with_golds(lambda gold, n: [gold, "many"], count=16)
    write_jsonl(Path("d.jsonl"), words)
    write_jsonl(Path("held.jsonl"), letters)
    assert refused("--val_dataset", "held.jsonl") == ["E366"]
    write_jsonl(
        Path("d.jsonl"), [{**row, "task": "a"} for row in words] + [{**row, "task": "b"} for row in letters]
    )
    assert refused("--task_column", "task") == ["E366"]
    mixed = succeed("plan", *flags(small("d.jsonl", "run", reward_funcs=["accuracy"])))
    assert "W129" in mixed.out + mixed.err
    write_jsonl(Path("d.jsonl"), with_golds(lambda gold, n: {"text": gold, "label": 1}))
    assert refused() == ["E310"]


def test_an_evaluation_takes_lists_as_the_option_says(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), with_golds(lambda gold, n: [gold, "many"]))
    found = {}
    for lists in ("any", "all"):
        words = ["--dataset", "d.jsonl", "--reward_funcs", "accuracy", "--max_completion_length", "16"]
        succeed("eval", "quickstart", *words, "--gold_lists", lists, "--output_dir", lists)
        found[lists] = json.loads(Path(lists, "eval.json").read_text())["eval_rewards/accuracy/mean"]
    assert found["any"] > 0 == found["all"]
