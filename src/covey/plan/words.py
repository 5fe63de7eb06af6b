"""Option values and texts as people read and type them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from covey.texts import Whole, joined, padded, tr
from covey.texts.catalogue import columns, is_wide
from covey.texts.language import spoken
from covey.types import Problem

WIDTH = 100
_NOTE = 10


def flags(edits: Mapping[str, Any]) -> str:
    """Return option values as they are typed: `--reward_funcs accuracy format`."""
    return Whole(" ".join(_flag(name, value) for name, value in edits.items()))


# What is to be typed as it stands: commands in backticks, JSON in quotes.
_WHOLE = r"`[^`]*`|'\{.*?\}'"
_WORD = re.compile(rf"([ \t\n]*)((?:{_WHOLE}|[^ \t\n])+)")
_UNIT = re.compile(rf"{_WHOLE}|.")


def wrapped(text: str, indent: str, width: int = WIDTH) -> str:
    """Return text wrapped at `width` columns, each line behind `indent`; no command in it is broken.

    A line ends at a space, or beside a Chinese character, which takes two columns.
    """
    lines, line = [], indent
    for space, word in _WORD.findall(text):
        for part in _parts(word):
            if line != indent and columns(line + space + part) > width:
                lines.append(line)
                line = indent
            line += part if line == indent else space.replace("\n", " ") + part
            space = ""
    return "\n".join([*lines, line])


# No line begins with one of the first, or ends in one of the second.
_CLOSING = frozenset("，。；：！？、）》」』】”’…,.;:!?)]}'\"%")
_OPENING = frozenset("（《「『【“‘([{")


def _parts(word: str) -> list[str]:
    """Return a word cut where a line may end, which is beside a wide character."""
    parts = [""]
    for unit in _UNIT.findall(word):
        before, after = parts[-1][-1:], unit[0]
        is_edge = bool(before) and (is_wide(before) or is_wide(after))
        if is_edge and before not in _OPENING and after not in _CLOSING:
            parts.append(unit)
        else:
            parts[-1] += unit
    return parts


def sentence(text: str) -> str:
    """Return a text with a full stop where it ends in a word, a number, a quotation mark or a bracket."""
    stops = (".", "!", "?", ":", "…", "。", "！", "？", "：")
    return text if not text or text.endswith(stops) else tr("{text}.", text=text)


def coded(code: str, text: str) -> list[str]:
    """Return a text as a few lines behind its code, in the language of this process."""
    first, *others = wrapped(spoken(text), " " * _NOTE).splitlines()
    return [f"{spoken(padded(code, _NOTE))}{first.lstrip()}", *others]


def note_lines(problem: Problem, num_fixes: int = 1) -> list[str]:
    """Return a warning or a note as a few lines in the language of this process: code, what was seen, and its
    first fixes."""
    lines = coded(problem.code, joined(" ", [sentence(problem.seen), tr(problem.why)]))
    for fix in problem.fixes[:num_fixes]:
        words = tr("{typed}: {text}", typed=flags(fix.edits), text=fix.text) if fix.edits else fix.text
        lines += wrapped(spoken(words), " " * _NOTE).splitlines()
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
    if isinstance(value, str) and value.isspace():
        return value.encode("unicode_escape").decode()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
