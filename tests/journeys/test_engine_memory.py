"""What a run says of its engine: a recording that failed, and a cache that is let go for the update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.plan import memory
from covey.rollout.native.engine import NativeEngine
from covey.training import backend
from journeys.helpers import assert_same_run, covey, flags, read_lines, rows, small, succeed, write_jsonl


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(40))


def test_a_recording_that_failed_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(compute: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def engine(policy: object, **options: object) -> NativeEngine:
        return NativeEngine(policy, stride=4, kernels=GpuKernels(Recordings(refuses)), **options)

    monkeypatch.setattr(backend, "NativeEngine", engine)
    done = succeed("train", *flags(small("d.jsonl", "run", max_steps=3)))
    assert done.out.count("W170") == 1 and "operation not permitted" in done.out
    events = read_lines(tmp_path / "run" / "events.jsonl")
    (found,) = [e for e in events if e.get("code") == "W170"]
    assert "operation not permitted when stream is capturing" in found["seen"]
    assert "W170" in covey("doctor", "run").out


def test_an_engine_that_rests_samples_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the update is made to need what the cache holds; the plan says so, and the run is the same."""
    asked = {"max_steps": 3, "gradient_checkpointing": "false"}
    succeed("train", *flags(small("d.jsonl", "kept", **asked)))
    rests = []
    real = NativeEngine.rest

    def rest(self: NativeEngine) -> None:
        real(self)
        rests.append(self._cache is None)

    monkeypatch.setattr(NativeEngine, "rest", rest)
    monkeypatch.setattr(memory, "TIGHT", 1e-9)
    monkeypatch.setattr(memory, "_SHOWN", 0.0)
    succeed("train", *flags(small("d.jsonl", "rested", **asked, ignore_memory_forecast=True)))
    assert rests and all(rests)
    assert_same_run(tmp_path / "kept", tmp_path / "rested", 3)
    plan = json.loads((tmp_path / "rested" / "plan.json").read_text())["memory"]
    assert plan["engine_rests"] and "KV cache" not in plan["phases"]["update"]["parts"]
    assert "KV cache" in plan["phases"]["rollout"]["parts"]
