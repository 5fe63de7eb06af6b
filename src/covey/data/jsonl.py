"""JSON: lines, plain or gzipped, read one at a time with the number of the line at fault, and whole lists."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.data.errors import DataError, in_file
from covey.json_lines import UNREADABLE, Line, opened, read_lines
from covey.texts import tr

# A backslash, a whole pair, or half of one, which is the group.
_SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)")
SUFFIXES = (".jsonl", ".jsonl.gz")


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file in its order; DataError names the file and the line."""
    return (row for _, _, row in iter_lines(path))


def iter_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Rows of a file, each with the byte at which its line begins and the line; lines of spaces aside."""
    number = 0
    try:
        with opened(path) as lines:
            for line in read_lines(lines):
                number = line.number
                if line.fault:
                    raise _bad(path, line)
                yield line.start, line.content, line.record
    except UNREADABLE as error:
        raise DataError(
            tr(
                "{path} could not be read after line {number}: {error}", path=path, number=number, error=error
            ),
            subject=path,
        ) from error


def row_at(descriptor: int, start: int, size: int) -> dict[str, Any]:
    """The row of a line that `iter_lines` has given."""
    line = os.pread(descriptor, size, start)
    row: dict[str, Any] = json.loads(line.decode("utf-8-sig" if start == 0 else "utf-8"))
    return row


def iter_json(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that is one list of objects, or objects one after the other."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(
            tr("{path} could not be read: {error}", path=path, error=error), subject=path
        ) from error
    except UnicodeDecodeError as error:
        words = tr("{path} is not UTF-8 text: {error}", path=path, error=error)
        raise DataError(words, kind="encoding", subject=path) from error
    number = 0
    try:
        for number, row in enumerate(_values(text), start=1):
            if not isinstance(row, dict):
                name = type(row).__name__
                words = tr("row {number}: a row must be a JSON object, not {name}", number=number, name=name)
                raise in_file(path, words)
            yield row
    except json.JSONDecodeError as error:
        words = tr("line {number}: {msg}", number=error.lineno, msg=error.msg)
        raise in_file(path, words, kind="line", line=error.lineno) from error


def _values(text: str) -> Iterator[Any]:
    """The items of a list, or values that only spaces part, one at a time."""
    decoder, position = json.JSONDecoder(), _behind_spaces(text, 0)
    if text.startswith("[", position):
        yield from _items(text, position + 1)
        return
    while (position := _behind_spaces(text, position)) < len(text):
        value, position = decoder.raw_decode(text, position)
        yield value


def _items(text: str, position: int) -> Iterator[Any]:
    """The items of a list, whose first may stand at a position."""
    decoder, position = json.JSONDecoder(), _behind_spaces(text, position)
    is_empty = text.startswith("]", position)
    while not is_empty:
        value, position = decoder.raw_decode(text, position)
        yield value
        position = _behind_spaces(text, position)
        if not text.startswith(",", position):
            break
        position = _behind_spaces(text, position + 1)
    if not text.startswith("]", position):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    if (position := _behind_spaces(text, position + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, position)


def _behind_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def refuse_lone_surrogates(directory: Path) -> None:
    """Raise for a JSON file of a directory that holds half of a surrogate pair: `datasets` drops it."""
    for path in sorted(directory.rglob("*.json*")):
        if isfile(path) and path.suffix != ".gz":
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if any(half for half in _SURROGATES.findall(line)):
                        words = tr(
                            "line {number}: the text contains half of a surrogate pair, which is not "
                            "valid Unicode",
                            number=number,
                        )
                        raise in_file(path, words, kind="surrogate")


def other_encoding(path: Path) -> str | None:
    """The encoding that the first bytes of a text file name, where it is not UTF-8."""
    with opened(path) as file:
        first = file.read(4)
    if first.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    return "UTF-16" if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


def _bad(path: Path, line: Line) -> DataError:
    words = tr("line {number}: {msg}", number=line.number, msg=line.why)
    if line.fault == "encoding":
        return in_file(path, words, kind="encoding")
    return in_file(path, words, kind="line", line=line.number)
