"""The rollout files of a directory: their names, which of them are one rollout, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from os.path import isdir
from pathlib import Path
from typing import Any, NamedTuple

from covey.errors import CoveyError
from covey.json_lines import UNREADABLE, opened, read_lines
from covey.telemetry.kept_files import add_sets
from covey.texts import joined, tr

_NAME = re.compile(
    r"rollout-([0-9]{6,})(?:\.([0-9]{1,9})-of-([1-9][0-9]{0,8}))?(?:\.jsonl(\.gz)?|(\.kept\.safetensors))"
)
_NUM_NAMED = 3


def rollout_path(directory: Path, rollout: int, rank: int = 0, world: int = 1) -> Path:
    """Return where a rank writes its records of a rollout.

    `rollout_path(d, 12)` is d / "rollout-000012.jsonl", and `rollout_path(d, 12, 0, 4)` is
    d / "rollout-000012.0-of-4.jsonl".
    """
    part = f".{rank}-of-{world}" if world > 1 else ""
    return directory / f"rollout-{rollout:06d}{part}.jsonl"


class RolloutFile(NamedTuple):
    """A file that one rank of `world` wrote of a rollout: its records, whose name ends in .gz where it
    `is_compressed`, or the `is_kept` one with their kept sets."""

    rollout: int
    world: int
    rank: int
    is_kept: bool
    is_compressed: bool
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The records of one rollout in the order of the ranks that wrote them, one file a rank; `problem` says
    why they are not one whole rollout, and is "" where they are. `is_incomplete`: a file is missing."""

    number: int
    paths: tuple[Path, ...]
    is_incomplete: bool = False
    problem: str = ""


def rollout_files(directory: Path) -> list[RolloutFile]:
    """Return every rollout file, in the order of rollouts, numbers of ranks, and ranks; records stand before
    their kept sets, and a plain file before its compressed twin."""
    if not isdir(directory):
        return []
    found = []
    for path in directory.iterdir():
        if match := _NAME.fullmatch(path.name):
            rank, world = int(match[2] or 0), int(match[3] or 1)
            if rank < world:
                is_kept, is_compressed = match[5] is not None, match[4] is not None
                found.append(RolloutFile(int(match[1]), world, rank, is_kept, is_compressed, path))
    return sorted(found)


def list_rollouts(directory: Path) -> dict[int, Rollout]:
    """Return each rollout with its files, in order; of a file and its compressed twin, the plain one.

    Files that different numbers of ranks wrote are not mixed: where one set of them is complete it is the
    rollout. Where none is, or several are, the rollout has a problem.
    """
    found = {}
    records = (file for file in rollout_files(directory) if not file.is_kept)
    for number, files in groupby(records, key=lambda file: file.rollout):
        by_world: dict[int, dict[int, Path]] = {}
        for file in files:
            by_world.setdefault(file.world, {}).setdefault(file.rank, file.path)
        found[number] = _rollout(directory, number, by_world)
    return found


def _rollout(directory: Path, number: int, by_world: Mapping[int, Mapping[int, Path]]) -> Rollout:
    """The rollout of the files in `by_world`: of each number of ranks, the file of each of them."""
    complete = [world for world, by_rank in by_world.items() if len(by_rank) == world]
    # Where no set is complete, the one that lacks the fewest files is named.
    world = complete[0] if complete else min(by_world, key=lambda world: world - len(by_world[world]))
    paths = tuple(by_world[world].values())
    if len(complete) == 1:
        return Rollout(number=number, paths=paths)
    if complete:
        problem = tr(
            "rollout {number} is in {directory} more than once: written by {worlds} ranks; move all but one "
            "of these sets away",
            number=number,
            directory=directory,
            worlds=joined(", ", map(str, complete)),
        )
        return Rollout(number=number, paths=paths, problem=problem)
    absent = (rank for rank in range(world) if rank not in by_world[world])
    names = [rollout_path(directory, number, rank, world).name for rank in islice(absent, _NUM_NAMED)]
    more = world - len(paths) - len(names)
    problem = tr(
        "rollout {number} in {directory} is incomplete: it lacks {names}{more}; copy what is missing "
        "there, or move all files of this rollout away",
        number=number,
        directory=directory,
        names=joined(", ", names),
        more=tr(" and {more} more", more=more) if more else "",
    )
    return Rollout(number=number, paths=paths, is_incomplete=True, problem=problem)


def without_unfinished(rollouts: Mapping[int, Rollout]) -> dict[int, Rollout]:
    """Return rollouts without the newest one where that lacks files: its run is still writing them, or was
    ended before it had."""
    newest = max(rollouts, default=None)
    return {n: rollout for n, rollout in rollouts.items() if n != newest or not rollout.is_incomplete}


def read_rollouts(
    directory: Path, *, may_be_unfinished: bool = False, with_sets: bool = False
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (rollout, its records) in order, from plain and from compressed files, one rollout at a time.

    `may_be_unfinished` is for the directory of a run that may still go on: a newest rollout that lacks files
    is left out. CoveyError as of `read_rollout`. Non-finite numbers are the words "nan", "inf" and "-inf";
    `covey.telemetry.jsonl.as_float` turns them back.
    """
    rollouts = list_rollouts(directory)
    for number, rollout in (without_unfinished(rollouts) if may_be_unfinished else rollouts).items():
        yield number, read_rollout(rollout, with_sets=with_sets)


def read_rollout(rollout: Rollout, *, with_sets: bool = False) -> list[dict[str, Any]]:
    """Return the records of a rollout as one rank would have written them, however many ranks did;
    `with_sets` puts the kept sets of the files beside them in.

    CoveyError where a file is missing or damaged: it names the rollout and the files.
    """
    if rollout.problem:
        raise CoveyError(rollout.problem)
    by_file = {path: list(_read(rollout.number, path)) for path in rollout.paths}
    if with_sets:
        for path, own in by_file.items():
            try:
                add_sets(path, own)
            except CoveyError as error:
                raise _damaged(rollout.number, str(error)) from error
    records = [record for own in by_file.values() for record in own]
    if len(rollout.paths) > 1:
        records.sort(key=lambda record: (record.get("group", 0), record.get("sibling", 0)))
    return records


def _read(rollout: int, path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, which was written at once: a last line without its end is damage."""
    try:
        with opened(path) as file:
            for line in read_lines(file):
                if line.fault or not line.is_whole:
                    raise _damaged(
                        rollout, tr("{path} is damaged in line {number}", path=path, number=line.number)
                    )
                yield line.record
    except UNREADABLE as error:
        raise _damaged(rollout, tr("{path} cannot be read: {error}", path=path, error=error)) from error


def _damaged(rollout: int, words: str) -> CoveyError:
    return CoveyError(
        tr(
            "rollout {number}: {words}; copy this file again, or move all files of this rollout away",
            number=rollout,
            words=words,
        )
    )
