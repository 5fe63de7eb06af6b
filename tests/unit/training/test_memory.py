"""What a run says of its memory: the bytes of each phase, and how far the forecast was off."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch

from covey.plan.memory import LIBRARIES, MemoryPlan, Phase
from covey.training.memory import MOST_OVER, StepCost, compared, resident_bytes
from support.runs import options, train_and_watch

PARTS = {"weights": 600, "activations": 400}
PLAN = MemoryPlan(
    phases=(Phase(name="load", parts={"weights": 600}), Phase(name="update", parts=PARTS)),
    needed_bytes=0,
    free_bytes=None,
    recompute="none",
)


def test_a_phase_is_what_is_resident_at_its_end() -> None:
    memory = StepCost(torch.device("cpu"))
    memory.begin()
    # Of the kernel: what is freed of malloc's may stay with the process.
    kept = mmap.mmap(-1, 1 << 27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(bytes([1]) * (1 << 27))
    memory.end("rollout")
    kept.close()
    memory.end("update")
    rollout, update = (memory.metrics[f"memory/{p}/held_gib"].value for p in ("rollout", "update"))
    assert rollout is not None and update is not None
    # 128 MiB that were let go.
    assert 0.1 < rollout - update < 0.15
    peak = memory.step_metrics()["memory/peak_gib"].value
    # The kernel counts pages with some delay.
    assert peak is not None and peak > rollout - 0.01
    assert update == pytest.approx(resident_bytes() / 2**30, abs=0.02)


def test_the_forecast_is_compared_once() -> None:
    memory = StepCost(torch.device("cpu"), PLAN)
    first = memory.compare(1)
    assert first is not None and first.forecast_bytes == 1000 + LIBRARIES
    assert memory.compare(2) is None
    assert StepCost(torch.device("cpu")).compare(1) is None


def test_a_gpu_that_holds_more_than_the_bound_is_named() -> None:
    most = round(1000 * (1 + MOST_OVER))
    within, beyond = (compared(n, PLAN, 1, is_gpu=True) for n in (most, most + 1))
    assert within.finding is None and within.error == pytest.approx(MOST_OVER)
    assert beyond.finding is not None and beyond.finding.code == "W176"
    assert "update" in beyond.finding.seen
    assert compared(500, PLAN, 1, is_gpu=True).error == -0.5
    # Resident bytes count libraries, and those of a CPU are no bound.
    assert compared(10 * LIBRARIES, PLAN, 1, is_gpu=False).finding is None


def test_every_step_has_the_memory_of_its_phases(tmp_path: Path) -> None:
    train_and_watch(options(Path("quickstart"), tmp_path / "run", max_steps=2, beta=0.02))
    lines = list(map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()))
    assert len(lines) == 2
    for line in lines:
        held = [line[f"memory/{phase}/held_gib"] for phase in ("rollout", "annotate", "update")]
        assert all(0.1 < value <= line["memory/peak_gib"] + 0.01 for value in held)
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    (found,) = (event for event in events if event["kind"] == "memory_forecast")
    assert found["measured_bytes"] / 2**30 == pytest.approx(lines[0]["memory/peak_gib"], abs=0.01)
    for line in lines:
        error = line["memory/peak_gib"] * 2**30 / found["forecast_bytes"] - 1
        assert error == pytest.approx(line["memory/forecast_error"], abs=0.02)
