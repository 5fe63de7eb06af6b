"""The rollout log: one file a rollout, complete enough to train on again, kept within bounds."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from covey.errors import CoveyError
from covey.telemetry.jsonl import encode, read_lines, write_bytes, write_text

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
    found: dict[int, Path] = {}
    if directory.is_dir():
        # Reverse name order puts ".jsonl" after ".jsonl.gz", so the plain file wins.
        for path in sorted(directory.iterdir(), reverse=True):
            if match := _NAME.fullmatch(path.name):
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def write_rollout(directory: Path, rollout: int, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one rollout, which appears under its name once it is whole; a second one is a CoveyError."""
    if rollout in list_rollouts(directory):
        raise CoveyError(f"{directory} already holds rollout {rollout}")
    path = rollout_path(directory, rollout)
    write_text(path, "".join(encode(record) + "\n" for record in records))
    return path


def compress_old(directory: Path, keep_plain: int) -> None:
    """Compress all but the newest `keep_plain` rollouts."""
    paths = list(list_rollouts(directory).values())
    for path in paths[: max(len(paths) - keep_plain, 0)]:
        if path.suffix != ".gz":
            # Without a time of its own the compressed file depends on its content only.
            write_bytes(path.with_name(path.name + ".gz"), gzip.compress(path.read_bytes(), 6, mtime=0))
            path.unlink()


def delete_oldest(directory: Path, max_gb: float) -> list[Path]:
    """Delete the oldest rollouts until the rest fits `max_gb`, and return what went; the newest stays."""
    paths = list(list_rollouts(directory).values())
    sizes = [path.stat().st_size for path in paths]
    total = sum(sizes)
    deleted: list[Path] = []
    for path, size in zip(paths[:-1], sizes[:-1], strict=True):
        if total <= max_gb * _GIGABYTE:
            break
        path.unlink()
        deleted.append(path)
        total -= size
    return deleted


def read_rollouts(directory: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (rollout, its records) in order, from plain and from compressed files, one file at a time.

    Non-finite numbers are the words "nan", "inf" and "-inf"; `covey.telemetry.jsonl.as_float` turns them
    back.
    """
    for rollout, path in list_rollouts(directory).items():
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rt", encoding="utf-8", newline="\n") as file:
                records = list(read_lines(file, path))
        except (OSError, EOFError) as error:
            raise CoveyError(f"{path} cannot be read: {error}") from error
        yield rollout, records
