"""Facts about time: what an earlier run of the same work has measured, in the run that is resumed, in the
output directory or beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.options.schema import Config
from covey.plan.facts import Facts, Measured
from covey.plan.pace import is_near, is_same_work, measured
from covey.plan.shape import shape_of
from covey.telemetry.jsonl import read_lines

_MOST_RUNS = 40
_MOST_BYTES = 4 << 20
# What a file of another program, or of another version, has elsewhere or not at all.
_FOREIGN = (OSError, ValueError, KeyError, TypeError, AttributeError, CoveyError)


def with_pace(facts: Facts, config: Config) -> Facts:
    """The facts with what a run of the same work took; one of as many completions comes first, then the
    nearest place, then the newest. Nothing is known of the GPUs of a layout."""
    if not facts.layout.is_here:
        return facts
    shape = shape_of(config, facts.num_processes)
    near: Measured | None = None
    for run in _runs(facts, config):
        found = _read(run, config, facts)
        if found is None or not is_near(found, shape):
            continue
        if found.completions_per_step == shape.completions_per_step:
            return replace(facts, measured=found)
        near = near or found
    return replace(facts, measured=near)


def _runs(facts: Facts, config: Config) -> Iterator[Path]:
    """Directories of runs: that which is resumed, the output directory, and the newest of those beside it."""
    output = Path(config.output_dir)
    own = [output] if facts.resume is None else [Path(facts.resume.path).parent, output]
    yield from dict.fromkeys(own)
    try:
        beside = [path for path in output.parent.iterdir() if (path / "metrics.jsonl").is_file()]
        beside.sort(key=lambda path: (path / "metrics.jsonl").stat().st_mtime, reverse=True)
    except OSError:
        return
    yield from [path for path in beside if path not in own][:_MOST_RUNS]


def _read(run: Path, config: Config, facts: Facts) -> Measured | None:
    """What a run measured; None for another run, and for files that cannot be read as those of a run."""
    try:
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        if not is_same_work(config, facts, plan):
            return None
        return measured(str(run), plan, _last_records(run / "metrics.jsonl"))
    except _FOREIGN:
        return None


def _last_records(path: Path) -> list[dict[str, Any]]:
    """The newest records of a file that may be large, and that may still be written."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _MOST_BYTES)
        file.seek(start)
        if start:
            file.readline()
        lines = file.read().decode("utf-8").splitlines(keepends=True)
    return list(read_lines(lines, path))
