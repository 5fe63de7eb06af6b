"""Values of tables as JSON has them: what a row holds is sent to rewards, recorded, and read back equal."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from covey.data.errors import RowFault

_SCALARS = (str, int, float, bool, type(None))


def plain_columns(
    row: Mapping[str, Any], is_kept: Callable[[Mapping[Any, Any]], bool] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The columns of a row as JSON values, and the names of those that cannot be: they hold bytes. Objects
    that `is_kept` says yes to stay as they are.

    Dates and times become ISO 8601 text, decimals text with all their digits, durations seconds, and what an
    array holds a list.
    """
    columns, unread = {}, []
    for name, value in row.items():
        try:
            columns[name] = value if isinstance(value, _SCALARS) else plain(value, is_kept)
        except RowFault:
            unread.append(name)
    return columns, unread


def plain(value: Any, is_kept: Callable[[Mapping[Any, Any]], bool] | None = None) -> Any:
    """A value as JSON has it; RowFault("bytes") for bytes, and for a type that no table is known to give."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Mapping):
        if is_kept is not None and is_kept(value):
            return value
        return {
            key if isinstance(key, str) else str(key): plain(item, is_kept) for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, is_kept) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return _seconds(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, uuid.UUID):
        return str(value)
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return plain(value.tolist())
    raise RowFault("bytes", type(value).__name__)


def _seconds(value: datetime.timedelta) -> int | float:
    # A duration of pandas knows nanoseconds, which total_seconds() rounds away.
    nanoseconds = getattr(value, "value", None)
    seconds = value.total_seconds() if nanoseconds is None else nanoseconds / 1e9
    return int(seconds) if math.isfinite(seconds) and seconds == int(seconds) else seconds


def is_encodable(value: Any) -> bool:
    """Whether every text in a JSON value can be written as UTF-8: half of a surrogate pair cannot."""
    if isinstance(value, str) and value.isascii():
        return True
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return False
    return True
