"""Ranks that tell each other something wrong of their rollouts, or are gone in the middle of it: the run ends
within seconds with one message, learns nothing of that rollout, and goes on to the bits of an undisturbed
one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.doctor.examine import examine
from covey.doctor.read import read_run
from covey.telemetry.rollouts import read_rollouts
from faults import exchange_run
from faults.test_ranks import DEADLINE_S, REWARD, WORDS, assert_same, assert_same_tensors
from support.ranks import Ended, run_ranks

pytestmark = pytest.mark.multi

# Without a KL term groups without a signal are not forwarded: rows leave the ranks that sampled them.
MOVING = [*WORDS[: WORDS.index("--beta")], "--beta", "0", *WORDS[WORDS.index("--beta") + 2 :]]
EVALUATED = ["--val_dataset", "quickstart#8", "--eval_steps", "2", "--eval_on_start", "no"]
# What was drawn and held of a rollout that is refused is drawn and held again.
SELECTED = ["--dynamic_sample", "true", "--max_resample_times", "2", "--replay_buffer_size", "4"]
FILTERED = ["--top_p", "0.8", "--min_p", "0.001"]
OPTIONS = {
    "rollout": MOVING,
    "selection": [*MOVING, *SELECTED],
    "evaluation": [*MOVING, *EVALUATED],
    "filters": [*MOVING, *FILTERED],
}
OF_ROWS = {"unknown": "F122", "twice": "F122", "missing": "F122", "other rows": "F110", "lost": "F138"}
OF_SETS = {
    "a set without its token": "sent something else for it: the same tokens, but other records",
    "a set less": "sent something else for it: the same tokens, but other records",
    "recorded a set without its token": "sampled tokens that are not among those that filters kept",
    "recorded a set less": "records of what filters kept for ",
}
GUARDS = {**OF_ROWS, **dict.fromkeys(OF_SETS, "F110")}
GONE = (
    *("killed before the move", "killed in the exchange", "exits in the exchange"),
    "killed in the move",
)


def run(folder: Path, where: str, fault: str = "none", rank: str = "1", reward: str = REWARD) -> Ended:
    """A run of four steps, which begins at its newest checkpoint."""
    (folder / "mine.py").write_text(reward)
    return run_ranks(exchange_run.__file__, fault, where, rank, "train", *OPTIONS[where], folder=folder)


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file of the run."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def findings(out: Path) -> list[dict[str, Any]]:
    return [event for event in lines(out, "events.jsonl") if event["kind"] == "finding"]


def assert_stopped(ended: Ended, out: Path, code: str, exit_code: int, *, steps: int, saved: int) -> None:
    """It ended with one message, which is on record and known to the doctor, after so many steps."""
    assert ended.code == exit_code, ended.said
    assert ended.seconds < DEADLINE_S and ended.left == []
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == [code], ended.said
    assert [event["code"] for event in findings(out)] == [code]
    assert code in [s.finding.code for s in examine(read_run(out), time.time()).sightings]
    assert [line["step"] for line in lines(out, "metrics.jsonl")] == list(range(1, steps + 1))
    steps_saved = [int(path.name.removeprefix("checkpoint-")) for path in out.glob("checkpoint-*")]
    assert max(steps_saved, default=0) == saved


def cases(usual: set[tuple[str, str]], *every: tuple[str, str]) -> list[Any]:
    return [pytest.param(*case, marks=[] if case in usual else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(
    ("fault", "where"),
    cases(
        {
            *(("unknown", "rollout"), ("other rows", "selection"), ("lost", "rollout")),
            ("missing", "evaluation"),
            *(("a set without its token", "filters"), ("recorded a set less", "filters")),
        },
        *((fault, "rollout") for fault in OF_ROWS),
        *((fault, "filters") for fault in OF_SETS),
        *(("other rows", "selection"), ("lost", "selection")),
        *(("twice", "evaluation"), ("missing", "evaluation")),
    ),
)
def test_what_contradicts_itself_stops_all(
    fault: str, where: str, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    ended, out = run(tmp_path, where, fault), tmp_path / "run"
    # The step that an evaluation belongs to has been taken by then.
    steps = exchange_run.TIMES[where][0]
    assert_stopped(ended, out, GUARDS[fault], 3, steps=steps, saved=steps)
    said = " ".join(ended.said.split())
    if fault in ("unknown", "twice", "other rows"):
        assert re.search(r"rank(s 0,)? 1\b", said.partition(GUARDS[fault])[2])
    if fault in OF_SETS:
        assert OF_SETS[fault] in said
    if fault == "lost":
        assert f"× {exchange_run.AWAY}" in said
    again = run(tmp_path, where)
    assert again.code == 0, again.said
    if where != "evaluation":
        assert_same(out, undisturbed(where), 4)
    else:
        assert_same_tensors(out, undisturbed(where), 4)
        assert [(e["step"], e["eval_reward"]) for e in lines(out, "events.jsonl") if "eval_reward" in e] == [
            (line["step"], line["eval_reward"])
            for line in lines(undisturbed(where), "metrics.jsonl")
            if line["step"] == steps
        ]
    assert [line["step"] for line in lines(out, "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fault", "where"),
    cases(
        {("killed before the move", "rollout"), ("exits in the exchange", "rollout")},
        *((fault, "rollout") for fault in GONE),
        ("killed in the exchange", "evaluation"),
    ),
)
@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_with_its_rows(
    fault: str, where: str, rank: str, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    ended, out = run(tmp_path, where, fault, rank), tmp_path / "run"
    # Killed in the evaluation after the second step, it is as if that had not been taken.
    steps, saved = (1, 0) if where == "evaluation" else (3, 2)
    assert_stopped(ended, out, "F133", 1, steps=steps, saved=saved)
    assert f"rank {rank} (process" in " ".join(ended.said.split())
    again = run(tmp_path, where)
    assert again.code == 0, again.said
    assert_same(out, undisturbed(where), 4)


FAILS = """
import os

def judge(completions, **kwargs):
    if os.environ["RANK"] == "1":
        raise ConnectionError("the judge of this rank is away")
    return [float(len(str(c))) for c in completions]
"""
NAN = """
import os

def judge(completions, **kwargs):
    return [float("nan") if os.environ["RANK"] == "1" else float(len(str(c))) for c in completions]
"""


def test_a_reward_that_fails_on_the_other_rank(tmp_path: Path) -> None:
    """The first rank says so, in the words of the other one, and the run goes on."""
    ended, out = run(tmp_path, "rollout", reward=FAILS), tmp_path / "run"
    assert ended.code == 0, ended.said
    said = " ".join(ended.said.split())
    assert "F107" in said and "the judge of this rank is away" in said
    (found,) = [event for event in findings(out) if event["code"] == "F107"]
    assert "8 of 16 completions, all of them of rank 1" in found["seen"]
    assert "the judge of this rank is away" in found["seen"]


def test_no_number_on_the_other_rank_names_row_and_text(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    ended, out = run(tmp_path, "rollout", reward=NAN), tmp_path / "run"
    assert ended.code == 3, ended.said
    assert ended.seconds < DEADLINE_S and ended.left == []
    (found,) = findings(out)
    # The first rollout is the same one whatever the rewards are.
    (_, records), *_ = read_rollouts(undisturbed("rollout") / "rollouts")
    first = next(r for r in records if (r["group"], r["sibling"]) == (2, 0))
    assert found["code"] == "F107"
    for words in (f"row {first['prompt_id'] + 1} of the data", "completion 1 of 4", repr(first["text"])[:80]):
        assert words in found["seen"] and words in " ".join(ended.said.split())
    assert not (out / "metrics.jsonl").exists()
