"""The run directory's records: configuration, plan, metrics and events; and what a resume puts aside."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from os.path import exists, isdir, isfile, islink
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.telemetry.jsonl import (
    append_line,
    as_float,
    cut_torn_tail,
    encode,
    read_records,
    write_bytes,
    write_text,
)
from covey.telemetry.rollouts import rollout_files
from covey.texts import Text, joined, packed, tr
from covey.types import Metric, StepRecord

_OF_RUN = (
    *("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "reward.png"),
    *("rollouts", "superseded", "evaluations", "checkpoint-*", "runs/events.out.tfevents.*"),
)

RESERVED = frozenset({"step", "rollout", "pass", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """What a resume put aside: where it went, and how many of each."""

    directory: Path
    num_metrics: int
    num_events: int
    num_rollouts: int


class RunFiles:
    """Writes the records of one run, but for its rollouts (`covey.telemetry.rollout_log`); nothing is created
    before the first of them.

    One process at a time writes to a run directory (`covey.telemetry.owner`). `clock` gives seconds since the
    epoch.
    """

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.output_dir = output_dir
        self.metrics_path = output_dir / "metrics.jsonl"
        self.events_path = output_dir / "events.jsonl"
        self.rollouts_dir = output_dir / "rollouts"
        self._clock = clock
        self._last_step: int | None = None
        self._num_bytes: int | None = None

    def tidy(self) -> None:
        """Delete what a kill left half written: none of it was ever under its own name."""
        for directory in (self.output_dir, self.rollouts_dir):
            for path in directory.glob(".tmp-*"):
                if isfile(path):
                    path.unlink()

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        write_text(self.output_dir / "config.yaml", text)

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write plan.json."""
        write_text(self.output_dir / "plan.json", encode(plan, indent=2) + "\n")

    def append_metrics(self, record: StepRecord) -> None:
        """Append one step to metrics.jsonl; one that is not behind those already there is a CoveyError.

        The line reads `{"step": 1, "rollout": 0, "pass": 0, "reward": 0.4, "n": {"reward": 64}}`.
        """
        last = self._last_recorded()
        if record.step <= last:
            words = tr(
                "{metrics_path} already holds step {last}; steps must be written once each, in order",
                metrics_path=self.metrics_path,
                last=last,
            )
            raise CoveyError(tr("{words}, but this is step {step}", words=words, step=record.step))
        self._refuse_other_content()
        append_line(self.metrics_path, _metrics_line(record))
        self._last_step = record.step
        self._num_bytes = self.metrics_path.stat().st_size

    def _refuse_other_content(self) -> None:
        """FileNotFoundError where metrics.jsonl is not as long as this process has left it."""
        if self._num_bytes is None:
            return
        num_bytes = self.metrics_path.stat().st_size if exists(self.metrics_path) else None
        if num_bytes != self._num_bytes:
            words = tr(
                "it has {num_bytes} bytes, but the run left {left}: another program changed it",
                num_bytes=num_bytes,
                left=self._num_bytes,
            )
            if num_bytes is None:
                words = tr("it was deleted during the run")
            raise FileNotFoundError(errno.ENOENT, words, str(self.metrics_path))

    def append_event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """Append one event to events.jsonl, with UTC time and its step (by default the last recorded one).

        What a finding says is recorded with its templates, too, as `texts`.
        """
        if clash := {"time"} & set(fields):
            raise CoveyError(tr("an event's field cannot be called {clash}", clash=joined(", ", clash)))
        if step is None:
            step = max(self._last_recorded(), 0)
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        texts = {name: packed(value) for name, value in fields.items() if isinstance(value, Text)}
        if kind == "finding" and texts and "texts" not in fields:
            fields["texts"] = texts
        append_line(self.events_path, {"kind": kind, "step": step, "time": now, **fields})

    def supersede_after(self, step: int, rollout: int) -> Superseded | None:
        """Move what was recorded after `step` and `rollout`, by any number of ranks, into superseded/<n>/,
        and say so as an event.

        A run resumed there writes these steps anew, so each stands once in the live files. Lines are copied
        before they are cut and files are renamed, so a kill at any moment loses nothing. None means that
        nothing was there.
        """
        self._last_recorded()
        self._last_step = None
        metrics = _split(self.metrics_path, step)
        events = _split(self.events_path, step)
        rollouts = [file for file in rollout_files(self.rollouts_dir) if file.rollout > rollout]
        if not (metrics.moved or events.moved or rollouts):
            return None
        directory = _next_directory(self.output_dir / "superseded")
        for path, part in ((self.metrics_path, metrics), (self.events_path, events)):
            if part.moved:
                write_bytes(directory / path.name, b"".join(part.moved))
                write_bytes(path, b"".join(part.kept))
        for file in rollouts:
            target = directory / "rollouts" / file.path.name
            target.parent.mkdir(exist_ok=True)
            os.rename(file.path, target)
        result = Superseded(
            directory=directory,
            num_metrics=len(metrics.moved),
            num_events=len(events.moved),
            num_rollouts=len({file.rollout for file in rollouts}),
        )
        self.append_event(
            "superseded",
            step=step,
            directory=directory.relative_to(self.output_dir),
            metrics=result.num_metrics,
            events=result.num_events,
            rollouts=result.num_rollouts,
        )
        return result

    def supersede_all(self) -> Path | None:
        """Move every record into superseded/<n>/, unread, for a run that starts anew; None: there is none."""
        names = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "rollouts")
        paths = [path for name in names if exists(path := self.output_dir / name)]
        if not paths:
            return None
        directory = _next_directory(self.output_dir / "superseded")
        for path in paths:
            os.rename(path, directory / path.name)
        self._last_step = None
        moved = [path.name for path in paths]
        self.append_event("superseded", step=0, directory=directory.relative_to(self.output_dir), files=moved)
        return directory

    def _last_recorded(self) -> int:
        """The last recorded step, -1 before the first; the first call also cuts lines that a kill left
        unfinished."""
        if self._last_step is None:
            torn = {path.name: cut_torn_tail(path) for path in (self.metrics_path, self.events_path)}
            self._last_step = max((record.step for record in read_metrics(self.metrics_path)), default=-1)
            for name, num_bytes in torn.items():
                if num_bytes:
                    self.append_event("torn_line_removed", file=name, bytes=num_bytes)
        return self._last_step


def read_metrics(path: Path) -> list[StepRecord]:
    """Return the steps of a metrics.jsonl in the order of the file; none where there is no file."""
    return [_step_record(line) for line in _read(path)]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of an events.jsonl in the order of the file; none where there is no file."""
    return _read(path)


def _read(path: Path) -> list[dict[str, Any]]:
    if not isfile(path):
        return []
    with path.open("rb") as file:
        return list(read_records(file, path))


def _metrics_line(record: StepRecord) -> dict[str, Any]:
    if clash := RESERVED & set(record.metrics):
        raise CoveyError(tr("a metric cannot be called {clash}", clash=joined(", ", sorted(clash))))
    line: dict[str, Any] = {"step": record.step, "rollout": record.rollout, "pass": record.pass_index}
    line.update({name: metric.value for name, metric in record.metrics.items()})
    line["n"] = {name: metric.count for name, metric in record.metrics.items()}
    return line


def _step_record(line: Mapping[str, Any]) -> StepRecord:
    metrics = {name: Metric(value=as_float(line[name]), count=count) for name, count in line["n"].items()}
    return StepRecord(step=line["step"], rollout=line["rollout"], pass_index=line["pass"], metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    kept: list[bytes]
    moved: list[bytes]


def _split(path: Path, step: int) -> _Split:
    """Divide the lines of a file into those up to `step` and those after it."""
    if not isfile(path):
        return _Split(kept=[], moved=[])
    with path.open("rb") as file:
        lines = [line for line in file if line.strip()]
    after = [record["step"] > step for record in read_records(lines, path)]
    pairs = list(zip(lines, after, strict=True))
    return _Split(kept=[x for x, late in pairs if not late], moved=[x for x, late in pairs if late])


def _next_directory(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name) for path in parent.iterdir() if path.name.isdigit()]
    directory = parent / str(max(taken, default=0) + 1)
    directory.mkdir()
    return directory


def delete_run(output_dir: Path) -> None:
    """Delete the records and checkpoints of a former run; files of other names stay.

    So do copies in trackers, each of which is a run of its own there, but for TensorBoard's, which would be
    drawn over the new curves.
    """
    leftovers = ("hang-*", "status-rank-*.json", "nccl-rank-*", "live")
    for path in _matching(output_dir, (*_OF_RUN, *leftovers)):
        if isdir(path) and not islink(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def put_aside(output_dir: Path) -> None:
    """Move the records and checkpoints of a former run into the first free directory earlier-N."""
    found = _matching(output_dir, _OF_RUN)
    aside = next(p for n in count(1) if not exists(p := output_dir / f"earlier-{n}"))
    for path in found:
        target = aside / path.relative_to(output_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in directory.glob(pattern)]
