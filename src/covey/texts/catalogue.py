"""Texts in another language, from a catalogue of gettext."""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from gettext import GNUTranslations, NullTranslations
from os.path import isfile
from pathlib import Path
from string import Formatter
from typing import Any

from covey.texts import Text

FOLDER = Path(__file__).parent
_FORMATTER = Formatter()
_IDEOGRAPH = re.compile(r"[\u3400-\u9fff]")
_LATIN = re.compile(r"[0-9A-Za-z]")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What covey says in a language; a template that is not there stays English."""

    translations: NullTranslations

    def said(self, text: str) -> str:
        """Return a text in this language. One that is no `Text` is looked up as it stands."""
        if not isinstance(text, Text):
            return self.translations.gettext(text) if text else ""
        if text.plural:
            template = self.translations.ngettext(text.template, text.plural, text.number)
        else:
            template = self.translations.gettext(text.template) if text.template else ""
        filled = "" if text.values else template
        for literal, field, spec, conversion in _FORMATTER.parse(template) if text.values else ():
            filled = _beside(filled, literal)
            if field is not None:
                filled = _beside(filled, self._value(text.values[field], spec or "", conversion))
        return filled + " " * (text.width - columns(filled))

    def _value(self, value: Any, spec: str, conversion: str | None) -> str:
        if isinstance(value, Text) and conversion is None:
            return format(self.said(value), spec)
        return format(_FORMATTER.convert_field(value, conversion), spec)


@functools.cache
def catalogue(language: str) -> Catalogue:
    """Return the catalogue of a language; of English, and of one that has none, an empty one."""
    file = FOLDER / language / "LC_MESSAGES" / "covey.mo"
    if not isfile(file):
        return Catalogue(NullTranslations())
    with file.open("rb") as opened:
        return Catalogue(GNUTranslations(opened))


def _beside(before: str, after: str) -> str:
    """Return two texts as one: with a space where a Chinese character meets a Latin letter or a digit, and
    with none behind a Chinese stop."""
    if not before or not after:
        return before + after
    if after == " " and before[-1] in "。；，：":
        return before
    ends = (before[-1], after[0])
    meet = any(_IDEOGRAPH.match(a) and _LATIN.match(b) for a, b in (ends, ends[::-1]))
    # A sentence within another one leaves its full stop there.
    if before[-1] == "。" and after[0] in "；，。：":
        before = before[:-1]
    return f"{before} {after}" if meet else before + after


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(2 if is_wide(char) else 1 for char in text)


def is_wide(char: str) -> bool:
    """Return whether a character takes two columns of a terminal."""
    return unicodedata.east_asian_width(char) in "WF"
