"""JSON lines, plain or gzipped, read one at a time with the number of the line at fault."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from covey.data.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz")


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file in its order; DataError names the file and the line."""
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(path, number, line)
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} could not be read after line {number}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: the bytes are no UTF-8 text") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a row is a JSON object, not {type(row).__name__}")
    return row
