"""The rollout log: of each rollout a file with this rank's records, complete enough to train on again, kept
within bounds."""

from __future__ import annotations

import errno
import gzip
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal

from covey.errors import CoveyError
from covey.telemetry.jsonl import encode, write_bytes, write_text
from covey.telemetry.kept_files import kept_path, without_sets, write_sets
from covey.telemetry.rollouts import rollout_files, rollout_path
from covey.texts import tr

RolloutPolicy = Literal["all", "none"] | int
_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Says which rollouts a run writes ("all", "none" or every N-th), compresses and keeps.

    Files older than those of the newest `compress_after` rollouts are compressed (None: never); beyond
    `max_gb` (of 10**9 bytes; None: no bound) the oldest rollouts are deleted, but never the newest.
    """

    log: RolloutPolicy = "all"
    compress_after: int | None = 10
    max_gb: float | None = None

    def includes(self, rollout: int) -> bool:
        """Return whether this rollout is written; of every N-th, number 0 is the first."""
        if self.log == "all" or self.log == "none":
            return self.log == "all"
        return rollout % self.log == 0


@dataclass(slots=True)
class _Own:
    """This rank's files of a rollout, by the names that they have uncompressed, and their bytes."""

    paths: list[Path] = field(default_factory=list)
    num_bytes: int = 0


class RolloutLog:
    """The rollout files of one rank of `world` in a directory.

    They are those that it writes, and of those that another number of ranks wrote before a resume each
    `world`-th one. The directory is listed once, when old files are first asked for: a listing for every
    rollout would make a long run slower and slower. Files that somebody takes away later are not missed.
    """

    def __init__(
        self, directory: Path, limits: RolloutLimits | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        self.limits = limits or RolloutLimits()
        self._directory = directory
        self._rank = rank
        self._world = world
        # By rollout, in order; None before the directory is listed.
        self._own: dict[int, _Own] | None = None
        self._num_bytes = 0
        # The rollouts that are not compressed.
        self._plain: deque[int] = deque()
        self._has_written = False

    def write(self, rollout: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write this rank's records of a rollout, also where it has none, and compress what is old by now.
        Kept sets of the records go into a tensor file beside them.

        The file appears under its name once it is whole; a second one of a rollout is a CoveyError.
        FileNotFoundError where the directory was deleted after the first one.
        """
        path = rollout_path(self._directory, rollout, self._rank, self._world)
        if not isdir(self._directory if self._has_written else self._directory.parent):
            words = tr("it was deleted during the run")
            raise FileNotFoundError(errno.ENOENT, words, str(self._directory))
        if exists(path) or exists(_compressed(path)):
            raise CoveyError(
                tr("{directory} already holds rollout {rollout}", directory=self._directory, rollout=rollout)
            )
        plain, kept = without_sets(records)
        text = "".join(encode(record) + "\n" for record in plain)
        # Records are whole where they are there, so their sets come first.
        sets_bytes = 0 if kept is None else write_sets(path, kept)
        write_text(path, text)
        self._has_written = True
        if self._own is not None:
            self._add(rollout, path, path.stat().st_size, is_plain=True)
            if kept is not None:
                self._add(rollout, kept_path(path), sets_bytes)
        if self.limits.compress_after is not None:
            self._compress_old(self.limits.compress_after)
        return path

    def _compress_old(self, keep_plain: int) -> None:
        """Compress the oldest until no more than `keep_plain` are not."""
        own = self._listed()
        while len(self._plain) > keep_plain:
            # A rollout that was deleted has none.
            files = own.get(self._plain.popleft(), _Own())
            for path in (p for p in files.paths if p.suffix == ".jsonl" and isfile(p)):
                # Without a time of its own the compressed file depends on its content only.
                whole = path.read_bytes()
                content = gzip.compress(whole, 6, mtime=0)
                write_bytes(_compressed(path), content)
                path.unlink()
                files.num_bytes += len(content) - len(whole)
                self._num_bytes += len(content) - len(whole)

    def oldest_kept(self) -> int:
        """Return the number of the first rollout from which on this rank's files fit its equal share of the
        limit: at most that of the newest, and 0 where there is no limit.

        Ranks delete the same rollouts, those before the largest of their numbers, so that each one that is
        left is complete.
        """
        if self.limits.max_gb is None:
            return 0
        own = self._listed()
        num_bytes = self._num_bytes
        for rollout, files in own.items():
            if num_bytes * self._world <= self.limits.max_gb * _GIGABYTE:
                return rollout
            num_bytes -= files.num_bytes
        return max(own, default=0)

    def delete_before(self, rollout: int) -> list[Path]:
        """Delete this rank's files of the rollouts before one, and return what went."""
        own = self._listed()
        deleted: list[Path] = []
        while own and (oldest := next(iter(own))) < rollout:
            files = own.pop(oldest)
            self._num_bytes -= files.num_bytes
            for path in (file for plain in files.paths for file in (plain, _compressed(plain))):
                if isfile(path):
                    path.unlink()
                    deleted.append(path)
        return deleted

    def _listed(self) -> dict[int, _Own]:
        """This rank's files by rollout, in order."""
        if self._own is None:
            self._own = {}
            for file in rollout_files(self._directory):
                if file.rank % self._world == self._rank:
                    is_plain = not (file.is_compressed or file.is_kept)
                    plain = file.path.with_suffix("") if file.is_compressed else file.path
                    self._add(file.rollout, plain, file.path.stat().st_size, is_plain=is_plain)
        return self._own

    def _add(self, rollout: int, path: Path, num_bytes: int, *, is_plain: bool = False) -> None:
        """Count a file in; a compressed twin, which comes after its plain file, is not."""
        assert self._own is not None
        files = self._own.setdefault(rollout, _Own())
        if path in files.paths:
            return
        files.paths.append(path)
        files.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if is_plain and (not self._plain or self._plain[-1] != rollout):
            self._plain.append(rollout)


def _compressed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")
