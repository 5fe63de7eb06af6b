"""The logs of TRL (trainer_state.json of transformers' Trainer) and of ms-swift (logging.jsonl)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.config.checkpoints import checkpoint_step
from covey.doctor.log import Log, metrics_of, read_json_lines, read_mapping
from covey.texts import tr
from covey.types import StepRecord

STATE = "trainer_state.json"
SWIFT_LOG, SWIFT_ARGS = "logging.jsonl", "args.json"
_OLD_REWARD = re.compile(r"(?:eval_)?rewards/[^/]+")
_SWIFT_STEP = "global_step/max_steps"
# Kept at a step by the end of a run, beside the metrics of the last step.
_SUMMARY = ("train_runtime", "train_loss", "total_flos", "last_model_checkpoint")


def find_state(directory: Path) -> Path | None:
    """The trainer_state.json of a directory, or of its newest checkpoint."""
    if isfile(directory / STATE):
        return directory / STATE
    steps = {p: checkpoint_step(p.name) for p in directory.glob("checkpoint-*")}
    saved = sorted((s, p) for p, s in steps.items() if s is not None and isfile(p / STATE))
    return saved[-1][1] / STATE if saved else None


def find_swift_log(directory: Path) -> Path | None:
    """The logging.jsonl of a directory, or of the newest version (v0-..., v1-...) below it."""
    candidates = [p for p in (directory, *directory.glob("v*-*")) if isfile(p / SWIFT_LOG)]
    return max(candidates, key=lambda p: (p / SWIFT_LOG).stat().st_mtime) / SWIFT_LOG if candidates else None


def read_state(path: Path) -> Log:
    """Read a trainer_state.json; one without a list `log_history` gives a log without records.

    A checkpoint of ms-swift has one too, with the options in an args.json beside it.
    """
    notes: list[str] = []
    state = read_mapping(path, notes)
    history = [e for e in state.get("log_history") or () if isinstance(e, dict)]
    steps = state.get("max_steps")
    folder = path.parent if checkpoint_step(path.parent.name) is None else path.parent.parent
    is_swift = isfile(path.parent / SWIFT_ARGS)
    if not is_swift:
        notes.append(
            tr(
                "TRL saves its options only as a pickled file, which is not read; this report uses the log "
                "in {name} alone",
                name=path.name,
            )
        )
    return Log(
        source="ms-swift" if is_swift else "TRL",
        path=path,
        records=_records((e.get("step"), e) for e in history),
        total_steps=steps if isinstance(steps, int) and steps > 0 else None,
        options=read_mapping(path.parent / SWIFT_ARGS, notes) if is_swift else {},
        saved=_saved(folder),
        notes=notes,
        written=path.stat().st_mtime,
    )


def read_swift(path: Path) -> Log:
    """Read a logging.jsonl, and the options in the args.json beside it."""
    notes: list[str] = []
    pairs = []
    total = None
    for line in read_json_lines(path, notes):
        step, _, planned = str(line.get(_SWIFT_STEP, line.get("step", ""))).partition("/")
        if step.isdigit():
            pairs.append((int(step), line))
            total = int(planned) if planned.isdigit() else total
    return Log(
        source="ms-swift",
        path=path,
        records=_records(pairs),
        total_steps=total,
        options=read_mapping(path.parent / SWIFT_ARGS, notes),
        saved=_saved(path.parent),
        notes=notes,
        written=path.stat().st_mtime,
    )


def _records(entries: Iterable[tuple[Any, Mapping[str, Any]]]) -> list[StepRecord]:
    """One record a step; an entry of an evaluation joins that of its step.

    How many completions a value saw is not in these logs. Its count is the steps since the one before, which
    is the least that it can be.
    """
    steps: dict[int, dict[str, Any]] = {}
    for step, entry in entries:
        if isinstance(step, int) and not any(name in entry for name in _SUMMARY):
            steps.setdefault(step, {}).update(entry)
    records = []
    before = 0
    for number, (step, line) in enumerate(sorted(steps.items())):
        metrics = metrics_of(_named(line), {}, max(step - before, 1))
        metrics.pop("step", None)
        records.append(StepRecord(step=step, rollout=number, pass_index=0, metrics=metrics))
        before = step
    return records


def _named(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with the names of today: older versions call the mean of a reward `rewards/NAME`."""
    return {f"{name}/mean" if _OLD_REWARD.fullmatch(name) else name: value for name, value in line.items()}


def _saved(folder: Path) -> list[int]:
    steps = (checkpoint_step(p.name) for p in folder.glob("checkpoint-*"))
    return sorted(step for step in steps if step is not None)


def is_state(path: Path) -> bool:
    """Whether a file is JSON with a log_history."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("log_history"), list)
