"""Rows that a program holds: a list of dicts, a table or stream of `datasets`, a DataFrame of pandas."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from covey.config.objects import STREAM, object_name
from covey.data import tables
from covey.data.errors import DataError
from covey.texts import tr


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRows:
    """Rows under the name that a configuration has for them: all of them, or None for a stream, which `read`
    begins anew at each call."""

    name: str
    rows: list[dict[str, Any]] | None
    read: Callable[[], Iterator[dict[str, Any]]]


def is_stream(value: Any) -> bool:
    """Return whether the rows of an object are read as they are needed."""
    return _is_of("datasets", "IterableDataset", value)


def live_rows(value: Any) -> LiveRows:
    """The rows of an object; DataError says why it holds none."""
    if is_stream(value):
        name = object_name(type(value).__name__, STREAM)
        return LiveRows(name=name, rows=None, read=lambda: tables.stream_live(tables.plain(value)))
    rows = _all_rows(value)
    name = object_name(f"{len(rows)} row{'' if len(rows) == 1 else 's'}", _checksum(rows))
    return LiveRows(name=name, rows=rows, read=lambda: iter(rows))


def _all_rows(value: Any) -> list[dict[str, Any]]:
    if _is_of("datasets", "DatasetDict", value) or _is_of("datasets", "IterableDatasetDict", value):
        splits = ", ".join(map(str, value))
        raise DataError(
            tr(
                "is a {name} with the splits {splits}; pass one of these splits",
                name=type(value).__name__,
                splits=splits,
            )
        )
    if _is_of("pandas", "DataFrame", value):
        try:
            value = tables.of_frame(value)
        except (ValueError, TypeError) as error:
            # pyarrow's errors are of these kinds: a column whose cells have several types, say.
            raise DataError(
                tr(
                    "is a DataFrame that cannot be converted to a table: {splitlines}",
                    splitlines=str(error).splitlines()[0],
                )
            ) from error
    if _is_of("datasets", "Dataset", value):
        return tables.rows_of(tables.plain(value))
    if not isinstance(value, list | tuple):
        raise DataError(tr("is of type {name}, from which covey cannot read rows", name=type(value).__name__))
    for number, row in enumerate(value):
        if not isinstance(row, Mapping):
            raise DataError(
                tr(
                    "is a list with a {name} at position {number}, where a dict is expected",
                    name=type(row).__name__,
                    number=number,
                )
            )
        odd = next((key for key in row if not isinstance(key, str)), None)
        if odd is not None:
            raise DataError(
                tr(
                    "has a row at position {number} whose column name {odd!r} is not text",
                    number=number,
                    odd=odd,
                )
            )
    return [dict(row) for row in value]


def _is_of(module: str, name: str, value: Any) -> bool:
    """Whether a value is of a class of a library; who has one has imported the library."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _checksum(rows: Iterable[Mapping[str, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for row in rows:
        digest.update(json.dumps(row, default=repr, skipkeys=True).encode() + b"\n")
    return digest.hexdigest()
