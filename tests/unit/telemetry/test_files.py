from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey.errors import CoveyError
from covey.telemetry import files as module
from covey.telemetry.files import RunFiles, read_events, read_metrics
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog
from covey.telemetry.rollouts import read_rollouts
from covey.types import Metric, StepRecord


def record(step: int, value: float | None = 0.5) -> StepRecord:
    return StepRecord(
        step=step, rollout=step // 2, pass_index=step % 2, metrics={"reward": Metric(value=value, count=64)}
    )


def run_files(path: Path) -> RunFiles:
    return RunFiles(path, clock=lambda: 1_700_000_000.25)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_is_created_before_the_first_record(tmp_path: Path) -> None:
    RunFiles(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_configuration_and_plan(tmp_path: Path) -> None:
    files = run_files(tmp_path / "run")
    files.write_config("beta: 0.0\n")
    files.write_plan({"bytes": 12, "ratio": math.inf})
    assert (tmp_path / "run" / "config.yaml").read_text() == "beta: 0.0\n"
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == {"bytes": 12, "ratio": "inf"}


def test_a_step_is_one_flat_line(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    metrics = {
        "reward": Metric(value=0.1 + 0.2, count=64),
        "kl": Metric(value=None, count=0),
        "loss": Metric(value=0.0),
    }
    files.append_metrics(StepRecord(step=7, rollout=3, pass_index=1, metrics=metrics))
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 7, "rollout": 3, "pass": 1, "reward": 0.30000000000000004, "kl": null, "loss": 0.0, '
        '"n": {"reward": 64, "kl": 0, "loss": 1}}\n'
    )


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    steps = [record(1, 5e-324), record(2, None), record(3, math.inf), record(4, -math.inf), record(5, 0.0)]
    for step in steps:
        files.append_metrics(step)
    assert read_metrics(files.metrics_path) == steps
    files.append_metrics(record(6, math.nan))
    value = read_metrics(files.metrics_path)[-1].metrics["reward"].value
    assert value is not None and math.isnan(value)
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_step_stands_once_also_for_a_later_process(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    files.append_metrics(record(1))
    for again in (files, run_files(tmp_path)):
        with pytest.raises(CoveyError, match="already holds step 1"):
            again.append_metrics(record(1))
    assert len(lines(files.metrics_path)) == 1


@pytest.mark.parametrize("name", ["step", "rollout", "pass", "n"])
def test_a_metric_cannot_hide_the_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(CoveyError, match=f"cannot be called {name}"):
        run_files(tmp_path).append_metrics(
            StepRecord(step=1, rollout=0, pass_index=0, metrics={name: Metric(value=1.0)})
        )


def test_events_carry_step_and_time(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    files.append_event("start", version="0.1")
    files.append_metrics(record(3))
    files.append_event("save", path=tmp_path / "checkpoint-3")
    files.append_event("note", step=9)
    assert read_events(files.events_path) == [
        {"kind": "start", "step": 0, "time": "2023-11-14T22:13:20.250+00:00", "version": "0.1"},
        {
            "kind": "save",
            "step": 3,
            "time": "2023-11-14T22:13:20.250+00:00",
            "path": str(tmp_path / "checkpoint-3"),
        },
        {"kind": "note", "step": 9, "time": "2023-11-14T22:13:20.250+00:00"},
    ]
    with pytest.raises(CoveyError, match="time"):
        files.append_event("x", time=1)


def test_a_line_cut_short_by_a_kill_is_removed_and_said(tmp_path: Path) -> None:
    run_files(tmp_path).append_metrics(record(1))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "rol')
    assert [r.step for r in read_metrics(path)] == [1]
    run_files(tmp_path).append_metrics(record(2))
    assert [r.step for r in read_metrics(path)] == [1, 2]
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["file"], event["bytes"]) == ("torn_line_removed", "metrics.jsonl", 16)


def recorded_run(path: Path) -> RunFiles:
    files = run_files(path)
    for step in range(1, 7):
        files.append_event("publish")
        files.append_metrics(record(step, step / 10))
    for rollout in range(4):
        RolloutLog(files.rollouts_dir).write(rollout, [{"rollout": rollout}])
    return files


def test_records_after_the_resumed_step_are_superseded_once(tmp_path: Path) -> None:
    recorded_run(tmp_path)
    files = run_files(tmp_path)
    moved = files.supersede_after(step=4, rollout=2)
    assert moved is not None and moved.directory == tmp_path / "superseded" / "1"
    assert (moved.num_metrics, moved.num_events, moved.num_rollouts) == (2, 1, 1)
    assert [r.step for r in read_metrics(files.metrics_path)] == [1, 2, 3, 4]
    assert [r.step for r in read_metrics(moved.directory / "metrics.jsonl")] == [5, 6]
    assert [(e["kind"], e["step"]) for e in read_events(files.events_path)][-2:] == [
        ("publish", 4),
        ("superseded", 4),
    ]
    assert [e["step"] for e in read_events(moved.directory / "events.jsonl")] == [5]
    assert [rollout for rollout, _ in read_rollouts(files.rollouts_dir)] == [0, 1, 2]
    assert [rollout for rollout, _ in read_rollouts(moved.directory / "rollouts")] == [3]
    assert files.supersede_after(step=4, rollout=2) is None

    files.append_metrics(record(5, 0.99))
    RolloutLog(files.rollouts_dir).write(3, [{"rollout": "again"}])
    again = run_files(tmp_path).supersede_after(step=4, rollout=2)
    assert again is not None and again.directory.name == "2"
    assert read_metrics(again.directory / "metrics.jsonl") == [record(5, 0.99)]
    assert [r.step for r in read_metrics(files.metrics_path)] == [1, 2, 3, 4]


def test_a_kill_while_superseding_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped before each write and each rename in turn; a later call finishes the work."""
    for at in range(1, 6):
        path = tmp_path / str(at)
        files = recorded_run(path)
        calls = 0

        def killed(function, at=at):  # type: ignore[no-untyped-def]
            def call(*args):  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                if calls == at:
                    raise KeyboardInterrupt
                return function(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(module, "write_bytes", killed(module.write_bytes))
            patch.setattr(module.os, "rename", killed(module.os.rename))
            with pytest.raises(KeyboardInterrupt):
                files.supersede_after(step=4, rollout=2)
        run_files(path).supersede_after(step=4, rollout=2)
        assert [r.step for r in read_metrics(path / "metrics.jsonl")] == [1, 2, 3, 4]
        assert [number for number, _ in read_rollouts(path / "rollouts")] == [0, 1, 2]
        saved = {r.step for p in path.glob("superseded/*/metrics.jsonl") for r in read_metrics(p)}
        assert saved == {5, 6}
        assert len(list(path.glob("superseded/*/rollouts/*"))) == 1


def test_files_of_any_number_of_ranks_are_superseded(tmp_path: Path) -> None:
    """Some ranks' files of a rollout are there and others not, as a kill leaves them."""
    files = recorded_run(tmp_path)
    write_parts(files.rollouts_dir, 5, 1, compressed=True)
    write_parts(files.rollouts_dir, 4, 0, 1)
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    moved = files.supersede_after(step=4, rollout=3)
    assert moved is not None and moved.num_rollouts == 2
    assert sorted(path.name for path in (moved.directory / "rollouts").iterdir()) == [
        "rollout-000004.0-of-3.jsonl",
        "rollout-000004.1-of-3.jsonl",
        "rollout-000005.1-of-3.jsonl.gz",
    ]
    assert [rollout for rollout, _ in read_rollouts(files.rollouts_dir)] == [0, 1, 2, 3]
    assert (tmp_path / "rollouts" / "notes.txt").exists()


def write_parts(directory: Path, rollout: int, *ranks: int, compressed: bool = False) -> None:
    """What these of three ranks write of a rollout."""
    limits = RolloutLimits(compress_after=0 if compressed else None)
    for rank in ranks:
        RolloutLog(directory, limits, rank=rank, world=3).write(rollout, [{"group": rank, "sibling": 0}])
