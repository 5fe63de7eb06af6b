"""Runs of a few steps with a planted fault, in this process: what names it, at which step, after how long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from covey.checks.judge import refuse_faults
from covey.checks.survey import Survey, survey
from covey.comm import Comm, LocalComm
from covey.config.resolve import from_dict
from covey.errors import ConfigError, GuardStop
from covey.training.build import build_job
from covey.training.loop import run
from covey.training.run import report_layout
from covey.training.watch import watched
from covey.types import Severity
from support.image_runs import drawings

BASE: Mapping[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#512"],
    "reward_funcs": ["accuracy", "format"],
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_tokens_per_micro_batch": 100,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 24,
    "learning_rate": 1e-4,
    "torch_dtype": "float32",
    "max_steps": 3,
    "save_steps": 100,
}

TRUE_OF_SMALL = {"F105", "F219"}
"""What is said of small models without a fault: rows of Gemma are padded, and random weights find no end."""

START = "start"
"""The step of what is named before weights load."""


@dataclass(frozen=True)
class Mutant:
    """A fault: how it is planted, with which options, and which code names it at which step.

    `code` holds several where one command has several faults. `says` is what the message has to hold.
    `is_read`: the fault is in what is read before the run. `is_resumed`: the run is stopped after two steps
    and the fault is in the one that goes on with it. `hangs`: the watchdog is to end it. `is_everywhere`: it
    is planted in every rank, and is what it is in the last one. `family`: a small model of it with random
    weights is trained, on drawings.
    """

    name: str
    code: str
    step: int | str
    plant: Callable[[pytest.MonkeyPatch], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    is_read: bool = False
    is_resumed: bool = False
    hangs: bool = False
    is_everywhere: bool = False
    family: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether nothing may be started."""
        return self.step == START


@dataclass(frozen=True)
class Seen:
    """What a run said first: None where it ended without a word."""

    code: str | None
    step: int | str | None
    seconds: float
    words: str = ""

    def is_of(self, mutant: Mutant) -> bool:
        """Whether this names the fault by its own code, at its step, in its words."""
        return (self.code, self.step) == (mutant.code, mutant.step) and mutant.says in self.words


class Surveys:
    """Surveys of configurations, which take longer than the runs; close them at the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._found: dict[str, Survey] = {}
        self._drawings: dict[str, Mapping[str, Any]] = {}

    def of(self, options: Mapping[str, Any], world: int) -> Survey:
        """The survey of these options, wherever they write to."""
        key = json.dumps([world, {k: v for k, v in options.items() if k != "output_dir"}], sort_keys=True)
        if key not in self._found:
            resolved = from_dict(options, world)
            self._found[key] = self._stack.enter_context(survey(resolved.config, world))
        return self._found[key]

    def drawings(self, family: str) -> Mapping[str, Any]:
        """The options of a run of a small model of a family on drawings; none without a family."""
        if family and family not in self._drawings:
            directory = self._stack.enter_context(TemporaryDirectory())
            self._drawings[family] = drawings(Path(directory), family)
        return self._drawings.get(family, {})

    def close(self) -> None:
        """End the reward workers."""
        self._stack.close()


def run_with(mutant: Mutant, surveys: Surveys, output: Path, comm: Comm | None = None) -> Seen:
    """Plant the fault in the last rank, run three steps, and see who speaks."""
    comm = comm or LocalComm()
    options = {**BASE, **surveys.drawings(mutant.family), **mutant.options, "output_dir": str(output)}
    if mutant.is_resumed:
        _run({**options, "stop_after_steps": 2}, surveys.of(options, comm.world), comm)
        options["resume_from_checkpoint"] = "latest"
    is_new = mutant.is_read or mutant.is_resumed
    found = None if is_new else surveys.of(options, comm.world)
    started = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if mutant.is_everywhere or comm.rank == comm.world - 1:
            mutant.plant(patch)
        if found is None:
            resolved = from_dict(options, comm.world)
            found = stack.enter_context(survey(resolved.config, comm.world))
        try:
            _run(options, found, comm, hangs=mutant.hangs)
        except ConfigError as error:
            faults = [p for p in error.problems if p.severity is Severity.ERROR]
            codes = " ".join(p.code for p in faults)
            return Seen(codes, START, time.perf_counter() - started, " ".join(p.seen for p in faults))
        except GuardStop as stop:
            found_s = time.perf_counter() - started
            return Seen(stop.finding.code, stop.finding.step, found_s, stop.finding.seen)
    return warned(output, time.perf_counter() - started, TRUE_OF_SMALL if mutant.family else ())


def train_quietly(options: Mapping[str, Any], found: Survey) -> None:
    """A run in this process."""
    _run(options, found, LocalComm())


def _run(options: Mapping[str, Any], found: Survey, comm: Comm, *, hangs: bool = False) -> None:
    """What `covey train` does, without its words on the terminal."""
    resolved = from_dict(options, comm.world)
    refuse_faults(resolved, found.facts)
    with ExitStack() as stack:
        job = build_job(resolved, found, comm)
        stack.callback(job.close)
        job.recorder.console = None
        report_layout(job)
        if hangs:
            stack.enter_context(watched(comm, resolved.config, job.saver.output_dir, None, may_exit=True))
        run(job)


def warned(output: Path, seconds: float, but: Collection[str] = ()) -> Seen:
    """The first finding in the records of a run, but for some codes."""
    path = output / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    findings = [event for event in map(json.loads, lines) if event["kind"] == "finding"]
    findings = [finding for finding in findings if finding["code"] not in but]
    first = findings[0] if findings else {"code": None, "step": None, "seen": ""}
    return Seen(first["code"], first["step"], seconds, first["seen"])


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No fault, or one that the options are."""
