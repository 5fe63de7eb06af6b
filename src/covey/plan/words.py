"""Option values and texts as people read and type them."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from covey.types import Problem

WIDTH = 100
_NOTE = 10


def flags(edits: Mapping[str, Any]) -> str:
    """Return option values as they are typed: `--reward_funcs accuracy format`."""
    return " ".join(_flag(name, value) for name, value in edits.items())


def wrapped(text: str, indent: str, width: int = WIDTH) -> str:
    """Return text wrapped at `width` columns, each line behind `indent`."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def note_lines(problem: Problem) -> list[str]:
    """Return a warning or a note as a few lines: code, what was seen, and the first way out."""
    text = f"{problem.seen} {problem.why}"
    lines = wrapped(text, " " * _NOTE).splitlines()
    lines[0] = f"{problem.code:<{_NOTE}}{lines[0].lstrip()}"
    for fix in problem.fixes[:1]:
        words = f"{flags(fix.edits)}: {fix.text}" if fix.edits else fix.text
        lines += wrapped(words, " " * _NOTE).splitlines()
    return lines


def _flag(name: str, value: Any) -> str:
    if value is None:
        return f"--{name} none"
    if isinstance(value, bool):
        return f"--{name} {str(value).lower()}"
    values = value if isinstance(value, list | tuple) else [value]
    return f"--{name} {' '.join(shlex.quote(_word(item)) for item in values)}"


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
