"""Every way in which a user's data comes: streams, mixtures, renamed columns, files of each format."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import (
    assert_same_run,
    covey,
    flags,
    metrics,
    plan_of,
    rollouts,
    rows,
    small,
    succeed,
    write_jsonl,
)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prompts(run: Path) -> list[str]:
    """The prompt of every group, in the order in which they were drawn."""
    return [r["prompt"] for found in rollouts(run) for r in found if r["sibling"] == 0]


def test_streaming_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Six rows, two a step: the fourth step is in the second pass over the data."""
    write_jsonl(Path("d.jsonl"), rows(6))
    plan = {"streaming": True, "max_steps": 4, "save_steps": 4, "eval_steps": 2}
    held = write_jsonl(tmp_path / "held.jsonl", rows(3, start=50))
    options = small("d.jsonl", "whole", **plan, val_dataset=[held])
    done = succeed("train", *flags(options))
    assert "data      read when it is needed" in done.out
    succeed("train", *flags({**options, "output_dir": "cut"}), "--stop_after_steps", "2")
    succeed("train", "cut/config.yaml", "--resume_from_checkpoint", "latest")
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 4)
    drawn = prompts(tmp_path / "whole")
    assert len(set(drawn[:6])) == 6 and set(drawn[6:]) <= set(drawn[:6])
    assert [r[0]["epoch"] for r in rollouts(tmp_path / "whole")] == [0, 0, 0, 1]
    assert [line["step"] for line in metrics(tmp_path / "whole") if "eval_reward" in line] == [2, 4]
    options = small("d.jsonl", "endless", streaming=True)
    del options["max_steps"]
    done = covey("train", *flags(options))
    assert done.code == 2 and "max_steps" in done.err


def test_a_stream_is_looked_at_before_the_run(tmp_path: Path) -> None:
    """Its first rows tell the form of completions, whether golds can be read, and whether a reward works."""
    chats = [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in rows(6)]
    write_jsonl(Path("chats.jsonl"), chats)
    Path("mine.py").write_text(
        "def last(completions, **kwargs):\n    return [float(len(c[0]['content'])) for c in completions]\n"
        "def broken(completions, **kwargs):\n    return [c.missing for c in completions]\n"
    )
    stream = {"streaming": True, "reward_funcs": ["mine.py:last"]}
    succeed("train", *flags(small("chats.jsonl", "run", **stream)))
    assert all(r["reward"] == len(r["text"]) for found in rollouts(tmp_path / "run") for r in found)
    stream["reward_funcs"] = ["mine.py:broken"]
    done = covey("train", *flags(small("chats.jsonl", "other", **stream)))
    assert done.code == 2 and "E316" in done.err and "missing" in done.err
    write_jsonl(Path("bad.jsonl"), [{**row, "answer": ""} for row in rows(6)])
    done = covey("train", *flags(small("bad.jsonl", "other", streaming=True)))
    assert done.code == 2 and "E310" in done.err


@pytest.mark.parametrize("text", ["quickstart#many", "quickstart#0"])
def test_a_part_of_the_built_in_task(text: str) -> None:
    done = covey("plan", *flags(small(text, "run")))
    assert done.code == 2 and "E302" in done.err and text in done.err


def test_sources_are_mixed_by_probability(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 200)):
        content = [{**row, "of": name} for row in rows(200, start)]
        write_jsonl(Path(f"{name}.jsonl"), content)
    options = small("", "run", num_generations=2, per_device_train_batch_size=64, max_steps=2)
    options |= {"dataset": ["a.jsonl", "b.jsonl"], "interleave_prob": [0.8, 0.2]}
    found = plan_of(*flags(options))
    # a.jsonl is used up after about 200 / 0.8 draws.
    assert 225 <= found["facts"]["num_rows"] <= 275
    succeed("train", *flags(options))
    seen = Counter(r["columns"]["of"] for step in rollouts(tmp_path / "run") for r in step)
    # 64 prompts: 51 are expected of a, with a standard deviation of 3.2.
    assert seen.total() == 128 and 2 * 40 <= seen["a"] <= 2 * 60
    del options["interleave_prob"]
    options["output_dir"] = "other"
    assert plan_of(*flags(options))["facts"]["num_rows"] == 400
    done = covey("plan", *flags(options | {"interleave_prob": [0.8, 0.3]}))
    assert done.code == 2 and "E109 interleave_prob" in done.err and "0.8 0.3" in done.err


def test_columns_are_renamed_and_named_sets(tmp_path: Path) -> None:
    content = [{"question_text": r["question"], "final": r["answer"], "n": i} for i, r in enumerate(rows(12))]
    write_jsonl(Path("d.jsonl"), content[:8])
    write_jsonl(Path("v.jsonl"), content[8:])
    options = small("d.jsonl", "run", val_dataset=["gsm=v.jsonl", "v.jsonl"], eval_steps=2)
    done = covey("train", *flags(options))
    assert done.code == 2 and "E303" in done.err and "question_text" in done.err
    assert not (tmp_path / "run").exists()
    options["columns"] = {"question_text": "question", "final": "solution"}
    succeed("train", *flags(options))
    for record in rollouts(tmp_path / "run")[0]:
        row = content[record["columns"]["n"]]
        assert row["question_text"] in record["prompt"]
        assert record["columns"]["solution"] == row["final"] and "final" not in record["columns"]
    line = metrics(tmp_path / "run")[-1]
    assert line["n"]["eval_gsm_reward"] == line["n"]["eval_v_reward"] == 4
    assert line["n"]["eval_reward"] == 8


def test_some_rows_of_the_built_in_task(tmp_path: Path) -> None:
    options = small("quickstart#20", "run", val_dataset=["quickstart#5"], eval_steps=2)
    assert plan_of(*flags(options))["facts"]["num_prompts"] == 20
    succeed("train", *flags(options))
    assert metrics(tmp_path / "run")[-1]["n"]["eval_reward"] == 5


def test_a_system_message(tmp_path: Path) -> None:
    content: list[dict[str, Any]] = rows(8)
    content[3] = {**content[3], "system": "Its own words."}
    write_jsonl(Path("d.jsonl"), content)
    done = succeed("train", *flags(small("d.jsonl", "run", system="Add.", max_steps=4)))
    seen = set(prompts(tmp_path / "run"))
    assert len(seen) == 8 and sum("Add." in p for p in seen) == 7
    (own,) = [p for p in seen if "Its own words." in p]
    assert content[3]["question"] in own
    assert "prompt 0" in done.out
    assert "<think>" in plan_of(*flags(small("d.jsonl", "r1", system="r1")))["lines"][-1]


def save_as(form: str, place: Path, content: list[dict[str, Any]]) -> Path:
    """The rows in a file or directory of a format."""
    import datasets
    import pyarrow.parquet

    table = datasets.Dataset.from_list(content)
    path = place / f"d.{form}"
    match form:
        case "csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(content[0]))
                writer.writeheader()
                writer.writerows(content)
        case "parquet":
            pyarrow.parquet.write_table(table.data.table, path)
        case "arrow":
            table.save_to_disk(path)
        case "json":
            table.to_json(path, lines=False)
        case _:
            write_jsonl(path, content)
    return path


def test_every_format_gives_the_same_run(tmp_path: Path) -> None:
    # The words are such that no format takes the golds for anything but text.
    content = [{**r, "answer": f"<answer>{r['answer']}</answer>"} for r in rows(8)]
    for form in ("jsonl", "json", "csv", "parquet", "arrow"):
        data = save_as(form, tmp_path, content)
        succeed("train", *flags(small(data, f"run_{form}", max_steps=1)))
        assert metrics(tmp_path / f"run_{form}") == metrics(tmp_path / "run_jsonl"), form
        records = rollouts(tmp_path / f"run_{form}")
        untimed = [[{**r, "seconds": 0} for r in found] for found in records]
        expected = [[{**r, "seconds": 0} for r in found] for found in rollouts(tmp_path / "run_jsonl")]
        assert untimed == expected, form


def test_numbers_of_a_csv(tmp_path: Path) -> None:
    """A column of golds that reads as numbers is a column of golds all the same."""
    data = save_as("csv", tmp_path, rows(8))
    found = plan_of(*flags(small(data, "run")))["facts"]["golds"]
    assert (found["num_checked"], found["num_bad"]) == (8, 0)
    succeed("train", *flags(small(data, "run", num_generations=8)))
    for record in (r for step in rollouts(tmp_path / "run") for r in step):
        right = f"<answer>{record['columns']['answer']}</answer>" in record["text"]
        assert {p["name"]: p["value"] for p in record["parts"]}["accuracy"] == float(right)


@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    """The plan of a large file takes seconds, and says how far it is."""
    content = [{**row, "question": f"{i}: {row['question']}"} for i, row in enumerate(rows(5000) * 20)]
    data = write_jsonl(tmp_path / "d.jsonl", content)
    words = [sys.executable, "-m", "covey", "plan", *flags(small(data, "run"))]
    started = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert seconds < 20
    assert "100,000 rows, 100,000 prompts used" in done.stdout
    assert re.search(r"reading the data: [\d,]+ of 100,000 rows", done.stderr)
