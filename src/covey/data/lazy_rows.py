"""Rows that are read when they are asked for: of a file of JSON lines, of a table of `datasets`, and of
others that are chosen from or changed. None of them holds more than the rows it is asked for."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from covey.data import jsonl
from covey.data.errors import DataError
from covey.texts import tr

Row = Mapping[str, Any]

_CHUNK = 1_000


class LazyRows(Sequence[Row]):
    """Rows that are made anew each time they are asked for; equal to any sequence of equal rows."""

    _columns: frozenset[str] | None = None

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Sequence[Row]:
        """The rows of these numbers, from 0 on, in this order."""

    @abstractmethod
    def identity(self) -> str | None:
        """A digest of all that the rows hold; None where they come from objects of a program."""

    def columns(self) -> frozenset[str]:
        """The columns of all rows."""
        if self._columns is None:
            self._columns = frozenset(column for row in self for column in row)
        return self._columns

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Row]: ...

    def __getitem__(self, number: int | slice) -> Row | Sequence[Row]:
        chosen = range(len(self))[number]
        return self.read([chosen])[0] if isinstance(chosen, int) else self.read(chosen)

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _CHUNK):
            yield from self.read(range(start, min(start + _CHUNK, len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class JsonLines(LazyRows):
    """The rows of a file of JSON lines; of each it holds where it lies in the file.

    Opening reads the file once, and DataError names a line that is no row; another one is raised for a file
    that has changed since.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _signature(path)
        columns: set[str] = set()
        digest, places = hashlib.blake2b(digest_size=16), array("q")
        for start, line, row in jsonl.iter_lines(path):
            places.extend((start, len(line)))
            digest.update(line)
            columns.update(row)
        self._places = np.frombuffer(places, dtype=np.int64).reshape(-1, 2)
        self._digest = digest.hexdigest()
        self._columns = frozenset(columns)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers."""
        if _signature(self._path) != self._file:
            words = tr("{path} was changed while it was read: start again", path=self._path)
            raise DataError(words, subject=self._path)
        with self._path.open("rb") as file:
            return [self._row(file.fileno(), number) for number in numbers]

    def _row(self, descriptor: int, number: int) -> Row:
        start, size = self._places[number].tolist()
        return jsonl.row_at(descriptor, start, size)

    def identity(self) -> str:
        """A digest of the lines."""
        return self._digest


class Picked(LazyRows):
    """Rows of several tables in an order of its own: row i is row `numbers[i]` of table `tables_of[i]`."""

    def __init__(self, tables: Sequence[Sequence[Row]], tables_of: Any, numbers: Any) -> None:
        self._tables = tables
        self._tables_of = np.asarray(tables_of, dtype=np.int32)
        self._numbers = np.asarray(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers, read table by table."""
        wanted = np.asarray(numbers, dtype=np.int64)
        of_table, at = self._tables_of[wanted], self._numbers[wanted]
        rows: list[Row] = [{}] * len(wanted)
        for index in np.unique(of_table):
            places = np.flatnonzero(of_table == index)
            found = _read(self._tables[int(index)], at[places].tolist())
            for place, row in zip(places.tolist(), found, strict=True):
                rows[place] = row
        return rows

    def identity(self) -> str | None:
        """A digest of the tables and the order."""
        of_tables = [identity_of(table) for table in self._tables]
        if any(identity is None for identity in of_tables):
            return None
        return _digest(of_tables, self._tables_of.tobytes(), self._numbers.tobytes())


class Changed(LazyRows):
    """Rows that a function changes, which is given each of them; `called` names all that it does."""

    def __init__(self, rows: Sequence[Row], change: Callable[[Row, int], Row], called: object) -> None:
        self._rows = rows
        self._change = change
        self._called = called

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers, changed."""
        return [self._change(r, n) for r, n in zip(_read(self._rows, numbers), numbers, strict=True)]

    def identity(self) -> str | None:
        """A digest of the rows and of what is done to them."""
        of_rows = identity_of(self._rows)
        return None if of_rows is None else _digest([of_rows, self._called])


def identity_of(rows: Sequence[Row]) -> str | None:
    """A digest of what rows hold; None where they are no lazy ones, or hold objects of a program."""
    return rows.identity() if isinstance(rows, LazyRows) else None


def columns_of(rows: Sequence[Row]) -> frozenset[str]:
    """The columns of rows, of whatever kind these are."""
    return rows.columns() if isinstance(rows, LazyRows) else frozenset(name for row in rows for name in row)


def picked(rows: Sequence[Row], numbers: Sequence[int]) -> Sequence[Row]:
    """The rows of these numbers."""
    return Picked([rows], np.zeros(len(numbers), dtype=np.int32), numbers)


def _read(rows: Sequence[Row], numbers: Sequence[int]) -> Sequence[Row]:
    return rows.read(numbers) if isinstance(rows, LazyRows) else [rows[number] for number in numbers]


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        words = tr("{path} could not be read: {error}", path=path, error=error)
        raise DataError(words, subject=path) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(values: object, *contents: bytes) -> str:
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=16)
    for content in contents:
        digest.update(b"%d " % len(content) + content)
    return digest.hexdigest()
