"""The rows of a table of `datasets`, read when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from covey.data import tables
from covey.data.lazy_rows import LazyRows, Row

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK = 10_000


class TableRows(LazyRows):
    """The rows of a table, whose columns lie in mapped files; images and sounds stay undecoded."""

    def __init__(self, table: Dataset) -> None:
        self._table = table
        self._columns = frozenset(table.column_names) if len(table) else frozenset()
        self._identity = ""

    def __len__(self) -> int:
        return len(self._table)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers."""
        return [*tables.rows_of(self._table, numbers)]

    def identity(self) -> str:
        """A digest of the columns and of all that they hold."""
        if not self._identity:
            digest = hashlib.blake2b(digest_size=16)
            for start in range(0, len(self), _CHUNK):
                digest.update(tables.contents(self._table, start, min(start + _CHUNK, len(self))))
            self._identity = digest.hexdigest()
        return self._identity
