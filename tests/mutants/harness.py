"""Runs of a few steps with a planted fault, in this process: what names it, at which step, after how long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.errors import GuardStop
from covey.training.facts import Survey, survey
from covey.training.loop import run
from covey.training.run import _report_layout as report_layout
from covey.training.run import build_job

BASE: Mapping[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart"],
    "reward_funcs": ["accuracy", "format"],
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_tokens_per_micro_batch": 300,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 24,
    "learning_rate": 1e-4,
    "torch_dtype": "float32",
    "max_steps": 3,
    "save_steps": 0,
}


@dataclass(frozen=True)
class Mutant:
    """A fault: how it is planted, with which options, and which code names it at which step."""

    name: str
    code: str
    step: int
    plant: Callable[[pytest.MonkeyPatch], None]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What a run said first: None where it ended without a word."""

    code: str | None
    step: int | None
    seconds: float


class Surveys:
    """Surveys of configurations, which take longer than the runs; close them at the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._found: dict[str, Survey] = {}

    def of(self, options: Mapping[str, Any]) -> Survey:
        """The survey of these options, wherever they write to."""
        key = json.dumps({k: v for k, v in options.items() if k != "output_dir"}, sort_keys=True)
        if key not in self._found:
            resolved = from_dict(options, 1)
            self._found[key] = self._stack.enter_context(survey(resolved.config, 1))
        return self._found[key]

    def close(self) -> None:
        """End the reward workers."""
        self._stack.close()


def run_with(mutant: Mutant, surveys: Surveys, output: Path) -> Seen:
    """Plant the fault, run three steps, and see who speaks."""
    options = {**BASE, **mutant.options, "output_dir": str(output)}
    found = surveys.of(options)
    started = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        try:
            job = build_job(from_dict(options, 1), found, LocalComm())
            job.recorder.console = None
            report_layout(job)
            run(job)
        except GuardStop as stop:
            return Seen(stop.finding.code, stop.finding.step, time.perf_counter() - started)
    return Seen(*_warned(output), time.perf_counter() - started)


def _warned(output: Path) -> tuple[str | None, int | None]:
    path = output / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    findings = [event for event in map(json.loads, lines) if event["kind"] == "finding"]
    return (findings[0]["code"], findings[0]["step"]) if findings else (None, None)


@cache
def quickstart_model() -> str:
    """Where the built-in model lies."""
    from covey.quickstart.task import MODEL_DIR

    return str(MODEL_DIR)
