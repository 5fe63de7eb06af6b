"""Which earlier run the time is taken from, and that torn and foreign files are passed over."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from covey.plan.batch import batch_plan
from covey.plan.facts import Facts, ResumeFacts
from covey.plan.report import report_json
from covey.training.facts import pace as pace_module
from covey.training.facts.pace import with_pace
from support.checks import GOOD, config, facts
from support.layouts import EIGHT


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def run(path: str, seconds: float, *, age: int = 0, steps: int = 8, **options: Any) -> Path:
    """The directory of a run whose steps took so long, written `age` seconds ago."""
    directory = Path(path)
    directory.mkdir(parents=True)
    asked = config(**options)
    content = report_json(asked, GOOD, batch_plan(asked, 1, GOOD.num_prompts))
    (directory / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    lines = [
        {"step": n, "rollout": n - 1, "time/step_s": seconds, "completions/mean_length": 9.0}
        for n in range(1, steps + 1)
    ]
    metrics = directory / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    moment = metrics.stat().st_mtime - age
    os.utime(metrics, (moment, moment))
    return directory


def found(given: Facts = GOOD, **options: Any) -> tuple[str, float] | None:
    got = with_pace(given, config(**options)).measured
    return None if got is None else (got.path, got.step_s)


def test_nothing_is_known() -> None:
    assert found() is None
    assert found(output_dir="a/b/c") is None


def test_the_newest_run_beside_it() -> None:
    run("runs/x-001", 1.0, age=20)
    run("runs/x-002", 2.0, age=10)
    run("runs/x-003", 3.0, age=30)
    run("runs/y-001", 4.0, model="models/other")
    run("elsewhere/x-001", 5.0)
    assert found() == ("runs/x-002", 2.0)


def test_its_own_directory_and_the_run_that_is_resumed_come_first() -> None:
    run("runs/x-001", 1.0)
    run("runs/a", 2.0, age=50)
    run("other/run", 3.0, age=99)
    assert found() == ("runs/a", 2.0)
    resumed = facts(resume=ResumeFacts(path="other/run/checkpoint-8", step=8))
    assert found(resumed) == ("other/run", 3.0)


def test_as_many_completions_come_before_the_newest() -> None:
    run("runs/x-001", 1.0, age=50)
    run("runs/x-002", 2.0, gradient_accumulation_steps=16)
    assert found() == ("runs/x-001", 1.0)
    assert found(gradient_accumulation_steps=32) == ("runs/x-002", 2.0)
    assert found(gradient_accumulation_steps=128) is None


def test_a_layout_is_another_machine() -> None:
    run("runs/x-001", 1.0)
    assert found(facts(layout=EIGHT)) is None


def test_a_run_in_progress_may_be_read() -> None:
    """The line that is being written is left out."""
    directory = run("runs/x-001", 1.0)
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "rollout": 8, "time/st')
    assert found() == ("runs/x-001", 1.0)


def test_of_a_long_run_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of a line on, which is left out."""
    directory = run("runs/x-001", 1.0, steps=50)
    monkeypatch.setattr(pace_module, "_MOST_BYTES", 1000)
    got = with_pace(GOOD, config()).measured
    assert got is not None and got.last_step == 50
    line = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert got.first_step == 50 - 1000 // (len(line) + 1) + 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", b""),
        ("plan.json", b'{"options": '),
        ("plan.json", b"[1, 2]"),
        ("plan.json", b'"text"'),
        ("plan.json", b'{"options": {"model": "models/tiny"}, "batch": {}, "facts": {}}'),
        ("plan.json", b'{"options": 3, "batch": [], "facts": null}'),
        ("plan.json", b"\xff\xfe"),
        ("plan.json", None),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", b"\x00\xff\n"),
        ("metrics.jsonl", b"no json\n" * 9),
        ("metrics.jsonl", b"[1]\n" * 9),
        ("metrics.jsonl", b'{"loss": 1.0, "epoch": 2}\n' * 9),
        ("metrics.jsonl", b'{"step": "a", "rollout": 0}\n' * 9),
        ("metrics.jsonl", None),
    ],
)
def test_damaged_and_foreign_files_are_passed_over(name: str, content: bytes | None) -> None:
    broken = run("runs/x-002", 2.0) / name
    run("runs/x-001", 1.0, age=10)
    if content is None:
        broken.unlink()
        broken.mkdir()
    else:
        broken.write_bytes(content)
    assert found() == ("runs/x-001", 1.0)


def test_files_beside_it_that_are_no_runs_are_passed_over() -> None:
    Path("runs").mkdir()
    Path("runs/notes.txt").write_text("x", encoding="utf-8")
    Path("runs/empty").mkdir()
    run("runs/x-001", 1.0)
    assert found() == ("runs/x-001", 1.0)
