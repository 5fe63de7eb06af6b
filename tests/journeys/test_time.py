"""A run, and then plans of the same: each says its time from what the run has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import flags, plan_of, read_lines, rows, small, succeed, write_jsonl


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The options of a run of six steps, and its directory."""
    place = tmp_path_factory.mktemp("time")
    options = small(write_jsonl(place / "d.jsonl", rows(16)), place / "runs" / "d-001", max_steps=6)
    assert "time" not in plan_of(*flags(options))
    succeed("train", *flags(options))
    return options, place / "runs"


def seconds(run: Path) -> list[float]:
    """What each step after the second took."""
    return sorted(line["time/step_s"] for line in read_lines(run / "metrics.jsonl")[2:])


def test_the_same_run_again(ran: tuple[dict[str, Any], Path]) -> None:
    options, runs = ran
    words = flags({**options, "output_dir": str(runs / "d-002"), "max_steps": 100})
    time = plan_of(*words)["time"]
    times = seconds(runs / "d-001")
    assert time["step_s"] == (times[1] + times[2]) / 2 and len(times) == 4
    assert time["seconds"] == 100 * time["step_s"] and not time["is_scaled"]
    lines = succeed("plan", *words).out.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("time      about "))
    assert "for 100 steps" in lines[first]
    assert f"as measured in {runs / 'd-001'}, steps 3–6, 8 completions of " in lines[first + 1]


def test_a_resumed_run_has_its_remaining_steps(ran: tuple[dict[str, Any], Path]) -> None:
    options, runs = ran
    again = {**options, "max_steps": 10, "resume_from_checkpoint": "latest", "allow_changes": True}
    time = plan_of(*flags(again))["time"]
    assert (time["steps"], time["measured"]["path"]) == (4, str(runs / "d-001"))


def test_other_work_has_no_time(ran: tuple[dict[str, Any], Path]) -> None:
    options, runs = ran
    for change in ({"max_completion_length": 8}, {"tuner_type": "lora"}, {"torch_dtype": "bfloat16"}):
        assert "time" not in plan_of(*flags({**options, **change, "output_dir": str(runs / "d-002")}))
    gpus = {"plan_gpus": 1, "plan_gpu_memory": "80GB", "output_dir": str(runs / "d-002")}
    assert "time" not in plan_of(*flags({**options, **gpus}))


def test_the_records_of_a_run_are_not_its_plans_business(ran: tuple[dict[str, Any], Path]) -> None:
    """A run's own plan.json has no time: ranks that start together would see different files."""
    options, runs = ran
    words = flags({**options, "output_dir": str(runs / "d-003"), "max_steps": 1})
    succeed("train", *words)
    plan = json.loads((runs / "d-003" / "plan.json").read_text(encoding="utf-8"))
    assert "time" not in plan and plan["facts"]["measured"] is None
