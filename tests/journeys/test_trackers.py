"""Trackers beside the run's own files: what they get, and that they cannot stop a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.telemetry.trackers import tensorboard
from journeys.helpers import covey, events, flags, metrics, rollouts, rows, small, succeed, write_jsonl


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(12))


def test_tensorboard_gets_every_second_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    options = small("d.jsonl", "run", max_steps=5, report_to=["tensorboard"], run_name="first try")
    options |= {"logging_steps": 2, "log_completions": 2, "val_dataset": ["d.jsonl#2"], "eval_steps": 2}
    done = succeed("train", *flags(options))
    run = tmp_path / "run"
    lines = {line["step"]: line for line in metrics(run)}
    assert list(lines) == [1, 2, 3, 4, 5]
    files = accumulator.EventAccumulator(str(run / "runs"), size_guidance={"tensors": 0, "scalars": 0})
    files.Reload()
    # The first step, every second one, and the last.
    for name in ("reward", "grad_norm", "rewards/accuracy/mean"):
        found = {e.step: e.value for e in files.Scalars(name)}
        assert list(found) == [1, 2, 4, 5]
        assert found == pytest.approx({s: lines[s][name] for s in found}, rel=1e-6)
    assert [e.step for e in files.Scalars("eval_reward")] == [0, 2, 4, 5]
    tables = {
        e.step: e.tensor_proto.string_val[0].decode() for e in files.Tensors("completions/text_summary")
    }
    assert list(tables) == [1, 2, 4, 5]
    shown = rollouts(run)[0][:2]
    assert tables[1].count("\n") == 1 + len(shown)
    for record in shown:
        assert record["text"].replace("<", "&lt;").replace(">", "&gt;") in tables[1]
    (name,) = [e.tensor_proto.string_val[0].decode() for e in files.Tensors("run_name/text_summary")]
    assert name == "first try"
    # The terminal is thinned in the same way.
    assert [n for n in range(1, 6) if f"step {n}/5" in done.out] == [1, 2, 4, 5]


def test_a_tracker_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("train", *flags(small("d.jsonl", "plain")))

    def refuse(start: object) -> None:
        raise ConnectionError("no such server")

    monkeypatch.setattr(tensorboard, "open_tracker", refuse)
    done = succeed("train", *flags(small("d.jsonl", "run", report_to=["tensorboard"])))
    assert "tensorboard is switched off (ConnectionError: no such server); the run continues" in done.out
    (said,) = [e for e in events(tmp_path / "run", "finding") if e["code"] == "F109"]
    assert "no such server" in said["error"]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.checks.run import look as facts

    monkeypatch.setattr(facts, "missing_trackers", lambda names: [("swanlab", "swanlab")])
    done = covey("train", *flags(small("d.jsonl", "run", report_to=["swanlab"])))
    assert done.code == 2
    assert "E116" in done.err and "pip install swanlab" in done.err
    assert not (tmp_path / "run").exists()
