"""JSON lines: numbers in full, non-finite ones as words, whole lines or none."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from os.path import isfile
from pathlib import Path, PurePath
from typing import Any

from covey.errors import CoveyError
from covey.json_lines import read_lines
from covey.texts import tr

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON; `encode({"a": 1e-320, "b": math.nan})` is '{"a": 1e-320, "b": "nan"}'.

    A float is written with all its digits, so that zero and what rounds to zero stay apart. Paths, enums,
    sets and dataclasses are written as text, value, sorted list and mapping; anything else raises
    CoveyError.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)
    except ValueError:
        # JSON has no word for these; the walk is slow, and only a record that holds one pays for it.
        return json.dumps(_spelled(value), ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)


def as_float(value: Any) -> Any:
    """Return the float that "nan", "inf" or "-inf" stands for, and anything else as it is."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def write_text(path: Path, text: str) -> None:
    """Put `text` in place of the file at once: a reader sees the former or the new content, whole."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with named(path), temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record as one line and hand it to the operating system.

    Where that fails, as on a full disk, the file stays as it was.
    """
    line = (encode(record) + "\n").encode("utf-8", "backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        written = 0
        try:
            while written < len(line):
                written += file.write(line[written:])
        except BaseException:
            file.truncate(before)
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Say in an OSError which file it is about; one from a write to an open file does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def cut_torn_tail(path: Path) -> int:
    """Remove what follows the last line break, a record that a kill cut short; return its bytes."""
    if not isfile(path):
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return len(content) - whole


def read_records(lines: Iterable[bytes], where: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `lines`, but for a last one without its line break: it is still being written."""
    for line in read_lines(lines):
        if not line.is_whole:
            return
        if line.fault:
            words = tr("line {number}: {msg}", number=line.number, msg=line.why)
            raise CoveyError(tr("{path}, {words}", path=where, words=words))
        yield line.record


def _plain(value: Any) -> Any:
    """Translate what `json` does not know."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise CoveyError(tr("a {name} cannot be recorded: {value!r:.80}", name=type(value).__name__, value=value))


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _spelled(_plain(value))
