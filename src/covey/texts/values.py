"""How values are put into texts: long ones are cut, and control characters are spelled out. Values may come
from a command line or from data."""

from __future__ import annotations

import os
import re
from numbers import Real
from typing import Any

LONGEST = 200
"""Characters of a value that a text shows."""

# What moves the cursor, colours, clears or renames a terminal, or turns the direction of writing; line breaks
# and tabs stay.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


_LONGEST_WHOLE = 4000


class Whole(str):
    """A value that texts show in full: a command to type, or a value that was cut before."""

    __slots__ = ()


class Shown(str):
    """A value that is no text, kept as its `str` and its `repr`."""

    __slots__ = ("written",)

    written: str

    def __new__(cls, text: str, written: str) -> Shown:
        self = super().__new__(cls, text)
        self.written = written
        return self

    def __repr__(self) -> str:
        return self.written


def visible(text: str) -> str:
    """Return a text whose control characters are written as in Python, such as `\\x1b`; those of lines and
    tabs stay."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def fitted(value: Any) -> Any:
    """Return a value as texts show it: a long one as its first `LONGEST` characters and its length, and
    control characters spelled out. Numbers, and short values without such characters, are
    returned as they are; a path object is cut only after `_LONGEST_WHOLE` characters."""
    if isinstance(value, Shown):
        return value
    if isinstance(value, Whole | os.PathLike):
        return Whole(visible(_cut(os.fspath(value), _LONGEST_WHOLE)))
    if isinstance(value, str):
        text = _cut(value)
        if UNSAFE.search(text):
            return Shown(visible(text), visible(repr(text)))
        return value if text is value else Whole(text)
    if value is None or isinstance(value, Real):
        return value
    text, written = visible(_cut(str(value))), visible(_cut(repr(value)))
    return value if text == str(value) and written == repr(value) else Shown(text, written)


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
