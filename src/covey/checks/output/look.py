"""What a run finds in its directory before it writes there: leftovers of a kill, records that cannot be read,
and names that something else has taken."""

from __future__ import annotations

import errno
import fnmatch
import tempfile
from collections.abc import Mapping
from os.path import exists, isdir, isfile, islink
from pathlib import Path
from typing import Any

from covey.config.checkpoints import checkpoint_step
from covey.errors import CoveyError
from covey.json_lines import read_lines
from covey.paths import trouble
from covey.telemetry.owner import LOCK
from covey.telemetry.rollouts import list_rollouts, read_rollout
from covey.texts import counted, tr

_LEFTOVERS = (
    *(LOCK, ".tmp-*", ".covey-*", "status-rank-*.json", "live"),
    # What is said of a run that failed before its first record.
    *("failed-rank-*.txt", "hang-*"),
)
_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", LOCK)
_DIRECTORIES = ("rollouts", "superseded")


def is_leftover(name: str) -> bool:
    """Whether a file of this name is no record: a run that is killed may leave it before its first one."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LEFTOVERS)


def in_the_way(output_dir: Path, step: int) -> tuple[tuple[str, str], ...]:
    """(path, words) of what stands under a name that a run at `step` will need and cannot use."""
    found: list[tuple[str, str]] = []
    if not isdir(output_dir):
        return ()
    for path in sorted(output_dir.iterdir()):
        of_step = checkpoint_step(path.name)
        if path.name in _FILES and not isfile(path):
            found.append((str(path), tr("is not a file, but the run writes a file with that name")))
        elif path.name in _DIRECTORIES and not isdir(path):
            found.append(
                (str(path), tr("is not a directory, but the run writes into a directory with that name"))
            )
        elif path.name in ("config.yaml", *_DIRECTORIES) and (closed := trouble(path)) is not None:
            found.append((str(path), closed.words))
        elif of_step is not None and of_step > step and (islink(path) or not isdir(path)):
            kind = "link" if islink(path) else "file"
            found.append(
                (str(path), tr("is a {kind}, and the run saves a checkpoint under that name", kind=kind))
            )
    return tuple(found)


def records_problem(output_dir: Path) -> tuple[str, str] | None:
    """(path, words) of the first line that makes a run's records unreadable, or None.

    A last line without its end is no problem: a kill cut it short, and it is removed.
    """
    for name, is_sound in (("metrics.jsonl", _is_step), ("events.jsonl", _is_event)):
        path = output_dir / name
        if not isfile(path):
            continue
        try:
            with path.open("rb") as file:
                lines = file.readlines()
        except OSError as error:
            return str(path), tr("cannot be read: {strerror}", strerror=error.strerror)
        for line in read_lines(lines):
            words = line.why
            if not line.fault and not is_sound(line.record):
                words = tr("it lacks what each record has")
            if words and line.is_whole:
                return str(path), tr("is damaged in line {number}: {words}", number=line.number, words=words)
    return None


def lost_records(output_dir: Path, step: int, rollout: int | None) -> tuple[str, ...]:
    """Describe the records that a run stopped at `step` should have and that its directory lacks: lines of
    metrics.jsonl, and the files of `rollout` (None: it was not written)."""
    lost = [_lost_steps(output_dir / "metrics.jsonl", step)]
    if rollout is not None:
        lost.append(_lost_rollout(output_dir / "rollouts", rollout))
    return tuple(words for words in lost if words)


def _lost_steps(path: Path, step: int) -> str:
    """The steps up to `step` of which metrics.jsonl has no line, in words; "" where there is none."""
    if not step:
        return ""
    if not isfile(path):
        return tr("{path} is gone, with the metrics of {steps}", path=path, steps=counted(step, "step"))
    try:
        with path.open("rb") as file:
            recorded = {line.record["step"] for line in read_lines(file) if _is_step(line.record)}
    except OSError:
        return ""  # said of the records as a whole
    lost = [number for number in range(1, step + 1) if number not in recorded]
    if not lost:
        return ""
    return tr(
        "{path} lacks {steps}; the first missing step is {first}, the last {last}",
        path=path,
        steps=counted(len(lost), "step"),
        first=lost[0],
        last=lost[-1],
    )


def _lost_rollout(directory: Path, number: int) -> str:
    """Why a rollout cannot be read, in words; "" where it can be."""
    rollout = list_rollouts(directory).get(number)
    if rollout is None:
        return tr("{directory} has no file of rollout {number}", directory=directory, number=number)
    try:
        is_empty = not read_rollout(rollout, with_sets=True)
    except CoveyError as error:
        return str(error)
    if is_empty:
        return tr("rollout {number} in {directory} has no records", number=number, directory=directory)
    return ""


def _is_step(record: Mapping[str, Any]) -> bool:
    counts = record.get("n")
    return (
        all(_is_whole(record.get(name)) for name in ("step", "rollout", "pass"))
        and isinstance(counts, dict)
        and all(name in record and _is_whole(count) for name, count in counts.items())
    )


def _is_event(record: Mapping[str, Any]) -> bool:
    return _is_whole(record.get("step")) and isinstance(record.get("kind"), str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def existing(path: Path) -> Path:
    """The nearest ancestor that is there."""
    while not exists(path):
        path = path.parent
    return path


def unwritable(output_dir: Path) -> str:
    """Why the directory cannot be made or written into, in words; "" where it can be."""
    where = existing(output_dir)
    if not isdir(where):
        return (
            tr("it is a file, but a run needs a directory")
            if where == output_dir
            else tr("{where} is a file, not a directory", where=where)
        )
    where = where.absolute()
    try:
        # Permission bits do not tell: root passes them everywhere, network file systems have rules of their
        # own.
        with tempfile.TemporaryDirectory(prefix=".covey-", dir=where):
            return ""
    except OSError as error:
        match error.errno:
            case errno.EACCES | errno.EPERM:
                return tr("you have no permission to write into {where}", where=where)
            case errno.EROFS:
                return tr("{where} is on a file system that is mounted read-only", where=where)
            case errno.ENOSPC | errno.EDQUOT:
                return tr("no space is left for you in {where}", where=where)
        return tr("{where}: {error}", where=where, error=error.strerror or str(error))
