"""What a tracker is, and what it is told when it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "covey"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a tracker starts with; `note` shows the user one line."""

    run_name: str | None
    output_dir: Path
    config: Mapping[str, Any]
    note: Callable[[str], None]


class Tracker(Protocol):
    """One client with its run open; every call comes from the one thread that opened it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an optimizer step."""

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record rows as a table; columns that a row lacks are empty there."""

    def close(self, exit_code: int) -> None:
        """Hand over what is left and end the run, as failed where `exit_code` is not 0."""


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the columns of all rows in the order in which they first appear."""
    return list(dict.fromkeys(column for row in rows for column in row))
