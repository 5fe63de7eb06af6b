"""Find out whose run a path is, and read it; what is missing or torn is noted, and nothing is written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from os.path import exists, isfile
from pathlib import Path
from typing import Any

import yaml

from covey.checkpoint.manifest import list_files, read_manifest
from covey.config.checkpoints import checkpoint_step
from covey.config.unreadable import fixes_of
from covey.doctor.completions import examine
from covey.doctor.foreign import (
    STATE,
    SWIFT_LOG,
    find_state,
    find_swift_log,
    is_state,
    read_state,
    read_swift,
)
from covey.doctor.log import Log, metrics_of, read_json_lines, read_mapping
from covey.errors import CheckpointError, ConfigError
from covey.health.names import MOST_COMMON
from covey.paths import Trouble, trouble, trouble_of
from covey.plan.problem import problem
from covey.telemetry.owner import LOCK
from covey.texts import Whole, joined, tr
from covey.types import Fix, Metric, Problem, StepRecord

_RESERVED = ("step", "rollout", "pass", "n")


def read_run(path: Path) -> Log:
    """Read the run at `path`, a directory or a log file; ConfigError where there is none (E408, E409)."""
    try:
        return _read_run(path)
    except OSError as error:
        file = path if error.filename is None else Path(os.fspath(error.filename))
        raise ConfigError([_unreadable(file, trouble_of(error))]) from error


def _read_run(path: Path) -> Log:
    if (found := trouble(path)) is not None:
        raise ConfigError([_unreadable(path, found)])
    if path.name == "metrics.jsonl" and isfile(path):
        path = path.parent
    if isfile(path):
        if path.name == SWIFT_LOG:
            return _known(read_swift(path))
        if is_state(path):
            return _known(read_state(path))
    elif any(isfile(path / name) for name in ("metrics.jsonl", "events.jsonl", "plan.json")):
        return _read_covey(path)
    elif log_file := find_swift_log(path):
        return _known(read_swift(log_file))
    elif log_file := find_state(path):
        return _known(read_state(log_file))
    raise ConfigError([_nothing(path)])


def _unreadable(path: Path, found: Trouble) -> Problem:
    seen = tr("{path} {words}.", path=str(path), words=found.words)
    other = tr("give the --output_dir of a run that you can read: `covey doctor runs/NAME`")
    return problem("E408", "RUN", seen, "", *fixes_of(found, other))


def _known(log: Log) -> Log:
    """Refuse a log of another tool that holds no step: there is nothing else to go by."""
    if log.records:
        return log
    raise ConfigError(
        [
            problem(
                "E409",
                "RUN",
                tr("{path} does not contain any step of a run.", path=log.path)
                + joined("", [tr(" {note}.", note=note) for note in log.notes[:-1]]),
                tr("The run ended before its first log line, or the file is damaged."),
                Fix(
                    text=tr(
                        "use a run with at least one logged step; logging_steps sets how often a step is "
                        "logged"
                    )
                ),
            )
        ]
    )


def _nothing(path: Path) -> Any:
    accepted = tr(
        "metrics.jsonl of covey, {swift_log} of ms-swift, {state} of TRL", swift_log=SWIFT_LOG, state=STATE
    )
    seen = (
        tr("{path} contains none of {accepted}.", path=str(path), accepted=accepted)
        if exists(path)
        else tr("{path} does not exist.", path=str(path))
    )
    if checkpoint_step(path.name) is not None:
        command = Whole(f"covey doctor {shlex.quote(str(path.parent))}")
        fix = Fix(text=tr("`{command}`", command=command))
        return problem("E408", "RUN", seen, tr("This is one checkpoint, not the directory of a run."), fix)
    return problem(
        "E408",
        "RUN",
        seen,
        tr("The path may be misspelled, or it is above or below the directory of the run."),
        Fix(text=tr("give the --output_dir of the run: `covey doctor runs/NAME`")),
    )


def _read_covey(path: Path) -> Log:
    notes: list[str] = []
    plan = read_mapping(path / "plan.json", notes)
    batch = plan.get("batch")
    total = batch.get("total_steps") if isinstance(batch, Mapping) else None
    if not isfile(path / "metrics.jsonl"):
        notes.append(tr("metrics.jsonl is missing"))
    lines = read_json_lines(path / "metrics.jsonl", notes)
    is_known = bool(lines) and all(MOST_COMMON in line for line in lines)
    extras = {} if is_known else examine(path / "rollouts", notes)
    records = [r for line in lines if (r := _record(line, extras)) is not None]
    if len(records) < len(lines):
        notes.append(
            tr(
                "metrics.jsonl: {num_lines} lines that are not step records were skipped",
                num_lines=len(lines) - len(records),
            )
        )
    gaps = sum(b.step != a.step + 1 for a, b in pairwise(records))
    if gaps:
        notes.append(tr("metrics.jsonl: steps are missing at {gaps} places", gaps=gaps))
    options = plan.get("options")
    files = [p for p in path.iterdir() if isfile(p)]
    log = Log(
        source="covey",
        path=path,
        records=records,
        total_steps=total if isinstance(total, int) else None,
        options=options if isinstance(options, Mapping) else _options(path / "config.yaml", notes),
        events=read_json_lines(path / "events.jsonl", notes),
        may_be_owned=exists(path / LOCK),
        written=max((p.stat().st_mtime for p in files), default=0.0),
    )
    return replace(log, saved=_checkpoints(path, log, notes), notes=notes)


def _record(line: Mapping[str, Any], extras: Mapping[int, Mapping[str, Metric]]) -> StepRecord | None:
    step, rollout, number = (line.get(name) for name in _RESERVED[:3])
    if not (isinstance(step, int) and isinstance(rollout, int) and isinstance(number, int)):
        return None
    counts = line.get("n")
    metrics = metrics_of(line, counts if isinstance(counts, Mapping) else {}, 1)
    for name in _RESERVED:
        metrics.pop(name, None)
    whole = {**extras.get(rollout, {}), **metrics}
    return StepRecord(step=step, rollout=rollout, pass_index=number, metrics=whole)


def _options(path: Path, notes: list[str]) -> dict[str, Any]:
    """The options of a config.yaml, without the sections that they stand under."""
    if not isfile(path):
        notes.append(tr("config.yaml is missing, so the options of the run are unknown"))
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(tr("config.yaml cannot be read: {error}", error=error))
        return {}
    options: dict[str, Any] = {}
    for key, value in content.items() if isinstance(content, Mapping) else ():
        options.update(value if isinstance(value, Mapping) else {key: value})
    return options


def _checkpoints(path: Path, log: Log, notes: list[str]) -> list[int]:
    """The steps of the whole checkpoints: those whose manifest and file sizes agree. Sums are not taken."""
    whole = []
    checkpoints = {s: p for p in path.glob("checkpoint-*") if (s := checkpoint_step(p.name)) is not None}
    for step, checkpoint in sorted(checkpoints.items()):
        try:
            listed = read_manifest(checkpoint).files
            sizes = {name: file.stat().st_size for name, file in list_files(checkpoint).items()}
        except (CheckpointError, OSError) as error:
            notes.append(str(error))
            continue
        wrong = [name for name, entry in listed.items() if sizes.get(name) != entry.size]
        if wrong:
            notes.append(
                tr(
                    "{name} is incomplete: {wrong} is missing or has the wrong size",
                    name=checkpoint.name,
                    wrong=joined(", ", wrong[:3]),
                )
            )
        else:
            whole.append(step)
    deleted = {str(e.get("path")) for e in log.events if e.get("kind") == "deleted"}
    for event in log.events:
        name = str(event.get("path"))
        saved = checkpoint_step(name) if event.get("kind") == "saved" else None
        if saved is not None and saved not in checkpoints and name not in deleted:
            notes.append(tr("{name} was saved but is no longer here", name=name))
            checkpoints[saved] = path
    return whole
