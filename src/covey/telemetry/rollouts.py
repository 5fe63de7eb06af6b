"""The rollout log: one file a rollout, complete enough to train on again, kept within bounds."""

from __future__ import annotations

import errno
import gzip
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal

from covey.errors import CoveyError
from covey.json_lines import UNREADABLE, opened
from covey.telemetry.jsonl import encode, read_records, write_bytes, write_text
from covey.texts import tr

RolloutPolicy = Literal["all", "none"] | int
_NAME = re.compile(r"rollout-([0-9]{6,})\.jsonl(\.gz)?")
_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What is written ("all", "none" or every N-th), what is compressed and how much may stay.

    Files older than the newest `compress_after` are compressed (None: never); beyond `max_gb` (of 10**9
    bytes; None: no bound) the oldest are deleted, but never the newest.
    """

    log: RolloutPolicy = "all"
    compress_after: int | None = 10
    max_gb: float | None = None

    def includes(self, rollout: int) -> bool:
        """Return whether this rollout is written; of every N-th, number 0 is the first."""
        if self.log == "all" or self.log == "none":
            return self.log == "all"
        return rollout % self.log == 0


def rollout_path(directory: Path, rollout: int) -> Path:
    """Return where a rollout is written: `rollout_path(d, 12)` is d / "rollout-000012.jsonl"."""
    return directory / f"rollout-{rollout:06d}.jsonl"


def list_rollouts(directory: Path) -> dict[int, Path]:
    """Return the file of each rollout, in order; of a file and its compressed twin, the plain one."""
    files: dict[int, Path] = {}
    if isdir(directory):
        # Reverse name order puts ".jsonl" after ".jsonl.gz", so the plain file wins.
        for path in sorted(directory.iterdir(), reverse=True):
            if match := _NAME.fullmatch(path.name):
                files[int(match[1])] = path
    return dict(sorted(files.items()))


class RolloutLog:
    """The rollout files that one process writes to a directory.

    The directory is listed when old files are first asked for, and each time that those which may be deleted
    run out: a listing for every rollout would make a long run slower and slower, and a list of all rollouts
    would grow with it. Files that somebody takes away meanwhile are not missed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Those that are not compressed; None before the directory is listed.
        self._plain: deque[int] | None = None
        self._num_bytes = 0
        self._deletable: deque[int] = deque()
        self._has_written = False

    def forget(self) -> None:
        """List the directory anew, as something else has changed it."""
        self._plain = None
        self._deletable.clear()

    def write(self, rollout: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write one rollout, which appears under its name once it is whole; a second one is a CoveyError.

        FileNotFoundError where the directory was deleted after the first one.
        """
        path = rollout_path(self._directory, rollout)
        if self._has_written and not isdir(self._directory):
            words = tr("it was deleted during the run")
            raise FileNotFoundError(errno.ENOENT, words, str(self._directory))
        if exists(path) or exists(_compressed(path)):
            raise CoveyError(
                tr("{directory} already holds rollout {rollout}", directory=self._directory, rollout=rollout)
            )
        write_text(path, "".join(encode(record) + "\n" for record in records))
        self._has_written = True
        if self._plain is not None:
            self._plain.append(rollout)
            self._num_bytes += path.stat().st_size
        return path

    def compress_old(self, keep_plain: int) -> None:
        """Compress the oldest until no more than `keep_plain` are not."""
        plain = self._listed()
        while len(plain) > keep_plain:
            path = rollout_path(self._directory, plain.popleft())
            if not isfile(path):
                continue
            # Without a time of its own the compressed file depends on its content only.
            whole = path.read_bytes()
            content = gzip.compress(whole, 6, mtime=0)
            write_bytes(_compressed(path), content)
            path.unlink()
            self._num_bytes += len(content) - len(whole)

    def delete_oldest(self, max_gb: float) -> list[Path]:
        """Delete the oldest rollouts until the rest fits `max_gb`, and return what went; the newest stays."""
        self._listed()
        deleted: list[Path] = []
        while self._num_bytes > max_gb * _GIGABYTE:
            if not self._deletable:
                self._deletable.extend(list(self._list())[:-1])
                if not self._deletable:
                    break
                continue
            plain = rollout_path(self._directory, self._deletable.popleft())
            for path in (plain, _compressed(plain)):
                if isfile(path):
                    self._num_bytes -= path.stat().st_size
                    path.unlink()
                    deleted.append(path)
        return deleted

    def _listed(self) -> deque[int]:
        if self._plain is None:
            self._plain = deque(number for number, path in self._list().items() if path.suffix != ".gz")
        return self._plain

    def _list(self) -> dict[int, Path]:
        """The file of each rollout, in order, whose bytes are counted anew."""
        files = list_rollouts(self._directory)
        self._num_bytes = sum(path.stat().st_size for path in files.values())
        return files


def _compressed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def read_rollouts(directory: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (rollout, its records) in order, from plain and from compressed files, one file at a time.

    Non-finite numbers are the words "nan", "inf" and "-inf"; `covey.telemetry.jsonl.as_float` turns them
    back.
    """
    for rollout, path in list_rollouts(directory).items():
        yield rollout, read_rollout(path)


def read_rollout(path: Path) -> list[dict[str, Any]]:
    """Return the records of one rollout's file, plain or compressed."""
    try:
        with opened(path) as file:
            return list(read_records(file, path))
    except UNREADABLE as error:
        raise CoveyError(tr("{path} cannot be read: {error}", path=path, error=error)) from error
