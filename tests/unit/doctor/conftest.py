"""Run directories made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.checkpoint.manifest import FileEntry, Manifest, hash_file, render_manifest
from covey.telemetry.files import RunFiles
from covey.types import Metric, StepRecord

Changes = Mapping[str, Callable[[int], float] | float]


def metrics(step: int, changes: Changes) -> dict[str, float]:
    """A healthy step, with changes that may be functions of it."""
    values: dict[str, Any] = {
        "reward": 0.5 + 0.04 * math.sin(step * 2.4),
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.125,
        "completions/mean_length": 100 + 5 * math.sin(step),
        "completions/clipped_ratio": 0.02,
        "entropy": 0.5,
        "grad_norm": 0.7,
        "learning_rate": 1e-6,
        "loss": 0.01,
        **changes,
    }
    return {name: value(step) if callable(value) else value for name, value in values.items()}


@dataclass(frozen=True)
class RunMaker:
    """Writes the files of a run as a run does."""

    root: Path

    def covey(
        self,
        num: int,
        changes: Changes | None = None,
        *,
        total: int | None = None,
        saved: tuple[int, ...] = (),
        events: tuple[tuple[str, int, Mapping[str, Any]], ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Path:
        path = self.root / "run"
        files = RunFiles(path)
        files.write_config("output:\n  output_dir: runs/a  # default\n")
        files.write_plan({"options": options or {}, "batch": {"total_steps": total or num}})
        for step in range(1, num + 1):
            found = {n: Metric(value=v, count=8) for n, v in metrics(step, changes or {}).items()}
            files.append_metrics(StepRecord(step=step, rollout=step - 1, pass_index=0, metrics=found))
        for kind, step, fields in events:
            files.append_event(kind, step=step, **fields)
        for step in saved:
            self.checkpoint(path, step)
        return path

    def checkpoint(self, path: Path, step: int) -> Path:
        target = path / f"checkpoint-{step}"
        target.mkdir()
        weights = target / "model.safetensors"
        weights.write_bytes(b"0" * 100)
        entry = FileEntry(size=100, sha256=hash_file(weights))
        manifest = Manifest(step=step, trainer=False, meta={}, files={weights.name: entry})
        (target / "manifest.json").write_text(render_manifest(manifest))
        return target

    def trl(self, num: int, changes: Changes | None = None, *, every: int = 1, total: int = 0) -> Path:
        """The output directory of a TRL run: the log is in its newest checkpoint."""
        history = [
            {"epoch": step / 100, "step": step, **metrics(step, changes or {})}
            for step in range(every, num + 1, every)
        ]
        history.append({"epoch": 1.0, "step": num, "train_runtime": 12.5, "train_loss": 0.01})
        path = self.root / "trl"
        for step in (num // 2, num):
            (path / f"checkpoint-{step}").mkdir(parents=True)
            kept = [entry for entry in history if entry["step"] <= step]
            state = {"global_step": step, "max_steps": total or num, "log_history": kept}
            (path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
        return path

    def swift(self, num: int, changes: Changes | None = None, **args: Any) -> Path:
        """The output directory of an ms-swift run: a version, numbers of some kinds as text."""
        path = self.root / "swift"
        version = path / "v0-20250101-120000"
        version.mkdir(parents=True)
        (version / "args.json").write_text(json.dumps(args))
        lines = []
        for step in range(1, num + 1):
            line: dict[str, Any] = dict(metrics(step, changes or {}))
            line |= {"grad_norm": str(line["grad_norm"]), "memory(GiB)": 20.5, "elapsed_time": "1m 2s"}
            line |= {"global_step/max_steps": f"{step}/{num}", "train_speed(s/it)": 3.1}
            lines.append(json.dumps(line))
        lines.append(json.dumps({"last_model_checkpoint": "v0/checkpoint-9", "best_metric": 0.5}))
        (version / "logging.jsonl").write_text("\n".join(lines) + "\n")
        return path


@pytest.fixture
def make(tmp_path: Path) -> RunMaker:
    return RunMaker(tmp_path)
