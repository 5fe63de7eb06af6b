"""What is unusual is said while a run trains, recorded, and counted at its end; the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey import train
from covey.doctor.examine import examine
from covey.doctor.read import read_run


def same(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that does not look at the completion."""
    return [0.5] * len(completions)


def test_a_run_without_signal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups a step: sixteen groups without spread after step 8."""
    run = tmp_path / "run"
    outcome = train(
        model="quickstart",
        dataset=["quickstart"],
        reward_funcs=[same],
        per_device_train_batch_size=16,
        max_completion_length=8,
        learning_rate=1e-4,
        max_steps=9,
        reward_trial=False,
        output_dir=str(run),
    )
    assert (outcome.exit_code, outcome.step) == (0, 9)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [(e["code"], e["step"]) for e in events if e["kind"] == "finding"]
    assert ("F211", 8) in found
    out = capsys.readouterr().out
    assert "F211      step 8: in 8 rollouts in a row all completions of each prompt got" in out
    assert "F211 in 2 steps" in out and f"`covey doctor {run}`" in out
    report = examine(read_run(run), 10**10)
    assert (report.verdict, report.exit_code) == ("not learning", 3)
    assert [s.finding.code for s in report.sightings if s.holds][:1] == ["F211"]
