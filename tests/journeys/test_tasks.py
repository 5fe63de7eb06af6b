"""Several tasks in one run, each with rewards of its own; rows left out and ordered by pass rates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import (
    assert_same_run,
    completions,
    covey,
    flags,
    metrics,
    plan_of,
    read_lines,
    rollouts,
    rows,
    small,
    succeed,
    write_jsonl,
)

KIND = """
def kind(prompts, completions, log_extra, **kwargs):
    log_extra("shown", [len(completions)] * len(completions))
    assert all("Say" in p for p in prompts)
    return [1.0 / (1 + len(c)) for c in completions]
"""
REWARDS = {"math": ["accuracy", "format"], "chat": ["kind"]}
OF = {"math": {"accuracy", "format"}, "chat": {"kind"}}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(KIND)


def math(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{**row, "task": "math"} for row in rows(count, start)]


def chat(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"Say {n}.", "task": "chat"} for n in range(start, start + count)]


def two_tasks(data: Path | str, output: str, **changes: Any) -> dict[str, Any]:
    """Options of a run on both tasks."""
    return small(
        data,
        output,
        **{
            "reward_funcs": ["accuracy", "format", "mine.py:kind"],
            "task_column": "task",
            "task_rewards": REWARDS,
            "dataset_shuffle": False,
            **changes,
        },
    )


def doctors_word() -> dict[str, Any]:
    """What `covey doctor` says of the whole run."""
    return dict(json.loads(covey("doctor", "whole", "--json").out))


def test_two_tasks_and_a_resume(tmp_path: Path) -> None:
    # Two prompts a rollout, in this order: the first rollout has no chat, the second no math.
    write_jsonl(tmp_path / "d.jsonl", [*math(2), *chat(2), *math(1, 2), *chat(2, 2), *math(1, 3)])
    write_jsonl(tmp_path / "v.jsonl", [*math(2, 50), *chat(1, 50)])
    options = two_tasks(
        "d.jsonl", "whole", max_steps=4, save_steps=2, keep_trainer_state=2, val_dataset=["v.jsonl"]
    )
    succeed("train", *flags(options))
    for record in (r for rollout in rollouts(tmp_path / "whole") for r in rollout):
        spoke = {p["name"] for p in record["parts"] if p["value"] is not None}
        assert spoke == OF[record["task"]] == OF[record["columns"]["task"]]
        assert ("shown" in record["extras"]) == (record["task"] == "chat")
        assert record["reward"] == pytest.approx(
            sum(p["value"] for p in record["parts"] if p["value"] is not None)
        )
    lines = metrics(tmp_path / "whole")
    names = [{n for n in line if n.startswith("tasks/")} for line in lines]
    assert len(names[0]) == 23 and names == [names[0]] * 4
    assert lines[0]["tasks/chat/reward"] is None and lines[0]["n"]["tasks/chat/reward"] == 0
    assert lines[1]["tasks/math/reward"] is None and lines[1]["tasks/chat/reward"] > 0
    assert lines[0]["tasks/math/reward"] == lines[0]["reward"]
    both = [lines[2][f"tasks/{task}/reward"] for task in ("math", "chat")]
    assert lines[2]["reward"] == pytest.approx(sum(both) / 2)
    last = lines[-1]
    assert last["eval_reward"] == pytest.approx(
        (2 * last["eval_tasks/math/reward"] + last["eval_tasks/chat/reward"]) / 3
    )
    # Stopped in the middle and resumed, it is the same run.
    cut = {**options, "output_dir": "cut"}
    succeed("train", *flags({**cut, "stop_after_steps": 2}))
    succeed("train", *flags({**cut, "resume_from_checkpoint": "latest"}))
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 4)
    changed = {"math": ["accuracy", "format", "kind"], "chat": ["kind"]}
    refused = covey(
        "train", *flags({**cut, "max_steps": 5, "task_rewards": changed, "resume_from_checkpoint": "latest"})
    )
    assert refused.code == 2 and "E405" in refused.err and "task_rewards" in refused.err
    # The verdict is that of the same records without tasks.
    told = doctors_word()
    path = tmp_path / "whole" / "metrics.jsonl"
    plain = [{k: v for k, v in line.items() if "tasks/" not in k} for line in read_lines(path)]
    for line in plain:
        line["n"] = {k: v for k, v in line["n"].items() if "tasks/" not in k}
    path.write_text("".join(json.dumps(line) + "\n" for line in plain))
    assert doctors_word() == told and told["verdict"] == "healthy"
    again = two_tasks("d.jsonl", "again", max_steps=4, replay_rollouts="whole/rollouts")
    succeed("train", *flags(again))
    for ours, theirs in zip(metrics(tmp_path / "again"), lines, strict=True):
        assert {n: v for n, v in ours.items() if n in names[0] and "/rewards/" not in n} == {
            n: v for n, v in theirs.items() if n in names[0] and "/rewards/" not in n
        }


@pytest.mark.slow
@pytest.mark.multi
def test_a_task_on_one_rank_alone(tmp_path: Path) -> None:
    """Each of two ranks scores one group: one has the rows of math, the other those of chat."""
    mixed = [row for pair in zip(math(3), chat(3), strict=True) for row in pair]
    write_jsonl(tmp_path / "d.jsonl", [*mixed, *math(2, 10)])
    write_jsonl(tmp_path / "v.jsonl", [*math(1, 50), *chat(1, 50)])
    options = two_tasks("d.jsonl", "one", max_steps=4, val_dataset=["v.jsonl"])
    succeed("train", *flags(options))
    two = {**options, "output_dir": "two", "per_device_train_batch_size": 4, "nproc_per_node": 2}
    done = subprocess.run(
        [sys.executable, "-m", "covey", "train", *flags(two)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert completions(tmp_path / "two") == completions(tmp_path / "one")
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert ours.keys() == theirs.keys() and ours["n"] == theirs["n"]
        for name in (n for n in theirs if "tasks/" in n):
            expected = theirs[name]
            assert ours[name] == (None if expected is None else pytest.approx(expected, rel=1e-6)), name
    for record in (r for rollout in rollouts(tmp_path / "two") for r in rollout):
        assert {p["name"] for p in record["parts"] if p["value"] is not None} == OF[record["task"]]


def test_sources_may_name_their_task(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(6))
    write_jsonl(tmp_path / "b.jsonl", [{"question": f"Say {n}."} for n in range(4)])
    options = two_tasks("", "run", dataset=["math=a.jsonl", "chat=b.jsonl"])
    assert plan_of(*flags(options))["facts"]["tasks"] == {"chat": 4, "math": 6}
    refused = covey("plan", *flags({**options, "dataset": ["math=a.jsonl", "b.jsonl"]}))
    assert refused.code == 2 and "E346" in refused.err and "7, 8, 9, 10" in refused.err


def test_what_a_reward_reads_is_asked_of_its_own_rows_alone(tmp_path: Path) -> None:
    """Golds are counted, and rewards tried, on the rows that they score."""
    write_jsonl(tmp_path / "d.jsonl", [*math(8), *chat(8)])
    assert covey("plan", *flags({**two_tasks("d.jsonl", "r"), "task_rewards": None})).code == 2
    plan = plan_of(*flags(two_tasks("d.jsonl", "r")))
    assert plan["facts"]["golds"]["num_checked"] == 8 and plan["facts"]["golds"]["num_bad"] == 0
    # A judge of the second task alone is tried on one of its rows.
    (tmp_path / "mine.py").write_text("def kind(completions, **kwargs):\n    return [1 / 0]\n")
    refused = covey("plan", *flags(two_tasks("d.jsonl", "r")))
    assert refused.code == 2 and "E316" in refused.err and "row 9" in refused.err


# -- pass rates --------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> dict[int, float]:
    """Rows of the built-in task, and what `covey eval` measured of each, by row number."""
    write_jsonl(tmp_path / "d.jsonl", rows(16))
    words = ["--val_dataset", "d.jsonl", "--reward_funcs", "accuracy", "--num_generations_eval", "4"]
    succeed("eval", "quickstart", *words, "--max_completion_length", "16", "--output_dir", "measured")
    lines = read_lines(tmp_path / "measured" / "pass_rates.jsonl")
    told = {line["prompt_id"]: line["pass_rate"] for line in lines}
    records = read_lines(tmp_path / "measured" / "d.jsonl")
    for number, value in told.items():
        own = [r["reward"] for r in records if r["prompt_id"] == number]
        assert len(own) == 4 and value == sum(own) / 4
    assert len(told) == 16 and len(set(told.values())) > 2
    return told


def drawn(run: Path) -> list[int]:
    """The rows of a run, in the order that they were drawn in."""
    return [r["prompt_id"] for rollout in rollouts(run) for r in rollout if r["sibling"] == 0]


def test_rows_are_left_out_and_ordered(tmp_path: Path, measured: dict[int, float]) -> None:
    base = small("d.jsonl", "run", reward_funcs=["accuracy"], pass_rates="measured")
    for bounds in (
        {"min_pass_rate": 0.25},
        {"max_pass_rate": 0.5},
        {"min_pass_rate": 0.25, "max_pass_rate": 0.5},
    ):
        low, high = bounds.get("min_pass_rate", 0.0), bounds.get("max_pass_rate", 1.0)
        inside = [n for n, value in measured.items() if low <= value <= high]
        plan = plan_of(*flags({**base, **bounds}))
        assert plan["facts"]["num_prompts"] == len(inside) == plan["batch"]["num_prompts"] < 16
    # A file of the rows in another order says the same: a prompt is known by its text.
    (tmp_path / "d.jsonl").write_text(
        "".join(reversed((tmp_path / "d.jsonl").read_text().splitlines(keepends=True)))
    )
    by_text = {15 - n: value for n, value in measured.items()}
    for curriculum, sign in (("easy_to_hard", -1), ("hard_to_easy", 1)):
        options = {**base, "curriculum": curriculum, "output_dir": curriculum, "max_steps": 8}
        succeed("train", *flags(options))
        values = [by_text[n] for n in drawn(tmp_path / curriculum)]
        assert values == sorted(values, key=lambda v: sign * v) and len(values) == 16
    # A run's own rollouts are a measurement too: of the accuracy that its files hold.
    plan = plan_of(*flags({**base, "pass_rates": "easy_to_hard", "min_pass_rate": 0.1}))
    assert plan["facts"]["pass_rates"]["num_measured"] == 16
    by_row: dict[int, list[float]] = {}
    for record in (r for rollout in rollouts(tmp_path / "easy_to_hard") for r in rollout):
        by_row.setdefault(record["prompt_id"], []).append(record["reward"])
    assert plan["facts"]["num_prompts"] == sum(sum(v) / len(v) >= 0.1 for v in by_row.values())
    # It may still go on: the newest rollout is not counted before each rank has written its file.
    (tmp_path / "easy_to_hard" / "rollouts" / "rollout-000008.1-of-2.jsonl").write_text("")
    again = plan_of(*flags({**base, "pass_rates": "easy_to_hard", "min_pass_rate": 0.1}))
    assert again["facts"]["pass_rates"] == plan["facts"]["pass_rates"]


def test_a_curriculum_resumes_and_its_measurement_may_not_change(
    tmp_path: Path, measured: dict[int, float]
) -> None:
    options = small(
        "d.jsonl", "whole", pass_rates="measured/pass_rates.jsonl", curriculum="hard_to_easy",
        min_pass_rate=0.25, max_steps=6, save_steps=3, keep_trainer_state=2,
    )  # fmt: skip
    succeed("train", *flags(options))
    cut = {**options, "output_dir": "cut"}
    succeed("train", *flags({**cut, "stop_after_steps": 3}))
    resume = {**cut, "resume_from_checkpoint": "latest"}
    file = tmp_path / "measured" / "pass_rates.jsonl"
    before = file.read_text()
    file.write_text(before.replace('"pass_rate": 0.25', '"pass_rate": 0.75'))
    refused = covey("train", *flags(resume))
    assert refused.code == 2 and "E405 pass_rates" in refused.err
    # The same lines in another order are the same measurement.
    file.write_text("".join(reversed(before.splitlines(keepends=True))))
    succeed("train", *flags(resume))
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 6)
    file.write_text(before.replace('"pass_rate": 0.25', '"pass_rate": 0.75'))
    longer = {**resume, "max_steps": 8, "allow_changes": True}
    succeed("train", *flags(longer))
    assert [line["step"] for line in metrics(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_column_of_pass_rates(tmp_path: Path) -> None:
    values = [0.0, None, 1.0, 0.5, 0.25, 0.75, 0.5, None]
    write_jsonl(
        tmp_path / "d.jsonl",
        [row | ({} if v is None else {"rate": v}) for row, v in zip(rows(8), values, strict=True)],
    )
    base = small("d.jsonl", "run", pass_rate_column="rate", dataset_shuffle=False, max_steps=4)
    succeed("train", *flags({**base, "curriculum": "easy_to_hard"}))
    # Rows that nobody measured stand in the middle, rows of one tenth as in the data.
    assert drawn(tmp_path / "run") == [2, 5, 1, 3, 6, 7, 4, 0]
    done = succeed(
        "plan", *flags({**base, "output_dir": "other", "min_pass_rate": 0.3, "max_pass_rate": 0.9})
    )
    assert "the column rate: 6 of 8 prompts measured, the others are kept; 3 left out" in done.out
    assert "0.5-0.6: 2" in done.out


def test_an_evaluation_of_a_checkpoint_leaves_no_row_out(tmp_path: Path, measured: dict[int, float]) -> None:
    options = small("d.jsonl", "run", pass_rates="measured", min_pass_rate=0.25, val_dataset=["d.jsonl"])
    succeed("train", *flags(options))
    for file in (tmp_path / "measured").iterdir():
        file.unlink()
    succeed("eval", "run/checkpoint-2")
    lines = read_lines(tmp_path / "run/evaluations/checkpoint-2/pass_rates.jsonl")
    assert len(lines) == 16 and {line["samples"] for line in lines} == {1}
