"""Option values and texts as people read and type them."""

from __future__ import annotations

import json
import re
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


# What is to be typed as it stands: commands in backticks, JSON in quotes.
_WHOLE = re.compile(r"`[^`]*`|'\{.*?\}'")


def wrapped(text: str, indent: str, width: int = WIDTH) -> str:
    """Return text wrapped at `width` columns, each line behind `indent`; no command in it is broken."""
    # textwrap breaks at spaces, and not at the no-break spaces that stand for those of a command.
    whole = _WHOLE.sub(lambda found: found[0].replace(" ", "\xa0"), text)
    lines = textwrap.fill(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\xa0", " ")


def sentence(text: str) -> str:
    """Return a text with a full stop where it ends in a word, a number, a quotation mark or a bracket."""
    return text if not text or text.endswith((".", "!", "?", ":", "…")) else f"{text}."


def coded(code: str, text: str) -> list[str]:
    """Return a text as a few lines behind its code."""
    first, *others = wrapped(text, " " * _NOTE).splitlines()
    return [f"{code:<{_NOTE}}{first.lstrip()}", *others]


def note_lines(problem: Problem) -> list[str]:
    """Return a warning or a note as a few lines: code, what was seen, and the first way out."""
    lines = coded(problem.code, f"{sentence(problem.seen)} {problem.why}")
    for fix in problem.fixes[:1]:
        words = f"{flags(fix.edits)}: {fix.text}" if fix.edits else fix.text
        lines += wrapped(words, " " * _NOTE).splitlines()
    return lines


def _flag(name: str, value: Any) -> str:
    if value is None or value == []:
        return f"--{name} none"
    if isinstance(value, bool):
        return f"--{name} {str(value).lower()}"
    values = value if isinstance(value, list | tuple) else [value]
    return f"--{name} {' '.join(shlex.quote(_word(item)) for item in values)}"


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
