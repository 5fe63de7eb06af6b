"""A run's log in one form, whoever wrote it, and how its lines become step records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.json_lines import read_lines
from covey.telemetry.jsonl import as_float
from covey.texts import tr
from covey.types import Metric, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What was read of a run.

    `source` is covey, TRL or ms-swift; `notes` say what is missing, torn or left out; `saved` holds the step
    of each whole checkpoint, and `written` when the newest file of the run was written, in seconds since the
    epoch.
    """

    source: str
    path: Path
    records: Sequence[StepRecord]
    total_steps: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    saved: Sequence[int] = ()
    notes: Sequence[str] = ()
    written: float = 0.0
    may_be_owned: bool = True
    """Whether a process may be writing to it: a run of covey that has ended leaves no lock."""

    @property
    def last_step(self) -> int:
        """The newest recorded step; 0 before the first."""
        return self.records[-1].step if self.records else 0


def read_json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; lines that are none are counted in a note, not raised."""
    if not isfile(path):
        return []
    with path.open("rb") as file:
        lines = list(read_lines(file))
    records = [line.record for line in lines if not line.fault]
    bad = len(lines) - len(records)
    if bad:
        are = tr("1 line is") if bad == 1 else tr("{bad} lines are", bad=bad)
        torn = tr("; the last one is cut short") if lines[-1].fault and not lines[-1].is_whole else ""
        notes.append(
            tr("{name}: {lines} not valid JSON and skipped{torn}", name=path.name, lines=are, torn=torn)
        )
    return records


def read_mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the object of a JSON file; empty, with a note, where it is missing or damaged."""
    if not isfile(path):
        notes.append(tr("{name} is missing", name=path.name))
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(tr("{name} cannot be read: {error}", name=path.name, error=error))
        return {}
    return value if isinstance(value, dict) else {}


def metrics_of(line: Mapping[str, Any], counts: Mapping[str, Any], usual: int) -> dict[str, Metric]:
    """The numbers of a line as metrics, also those that are spelled out; other values are left out.

    `usual` is the count of a metric that `counts` does not have.
    """
    metrics = {}
    for name, value in line.items():
        number = _number(value)
        if number is not None:
            count = counts.get(name, usual)
            metrics[name] = Metric(value=number, count=count if isinstance(count, int) else usual)
    return metrics


def _number(value: Any) -> float | None:
    value = as_float(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
