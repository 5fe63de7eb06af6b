"""JSON lines, plain or gzipped: how they are read, and what can be wrong with a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from covey.texts import tr

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file raises that is gone, cut short or not compressed."""

LineFault = Literal["", "json", "encoding", "object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its number from 1, the byte at which it begins, its bytes, and its object, `{}` where it has
    none, with the fault and why.

    `is_whole` is False for a last line without its line break: who wrote it may have been ended in it.
    """

    number: int
    start: int
    content: bytes
    record: dict[str, Any]
    is_whole: bool
    fault: LineFault = ""
    why: str = ""


def opened(path: Path) -> IO[bytes]:
    """Open a file for its lines, decompressed where its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def read_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """Return each line that is not blank; a byte order mark in front of the first one is no part of it.

    `[line.record for line in read_lines([b'{"a": 1}\\n'])]` is `[{"a": 1}]`.
    """
    start = 0
    for number, content in enumerate(lines, start=1):
        if content.strip():
            fault, why, record = _parsed(content, "utf-8-sig" if number == 1 else "utf-8")
            yield Line(
                number=number,
                start=start,
                content=content,
                record=record,
                is_whole=content.endswith(b"\n"),
                fault=fault,
                why=why,
            )
        start += len(content)


def _parsed(content: bytes, encoding: str) -> tuple[LineFault, str, dict[str, Any]]:
    try:
        value = json.loads(content.decode(encoding))
    except UnicodeDecodeError:
        return "encoding", tr("the bytes are not UTF-8 text"), {}
    except json.JSONDecodeError as error:
        return "json", error.msg, {}
    except (ValueError, RecursionError) as error:
        # A number of too many digits, or lists that are nested too deeply.
        return "json", str(error), {}
    if not isinstance(value, dict):
        return "object", tr("a row must be a JSON object, not {name}", name=type(value).__name__), {}
    return "", "", value
