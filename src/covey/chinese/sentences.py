"""Sentences of messages in Chinese.

A message is put together where its problem is found, with names and numbers in it. So its English text is
matched against the templates of sentences.txt, whose opening lines say how a template is written, and the
parts that differ go into the Chinese counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.chinese.entries import entries

_FILE = Path(__file__).parent / "sentences.txt"
_SLOT = re.compile(r"\{([w*+]?)\}")
_PLACE = re.compile(r"\{(\d)\}")
_IDEOGRAPH = re.compile(r"[\u3400-\u9fff]")
_LATIN = re.compile(r"[0-9A-Za-z]")
# The full stop at the end of a text, which three dots that leave something out are not.
_STOP = re.compile(r"(?<=\.\.\.)\.$|(?<!\.)\.$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An English sentence with slots between its fixed parts, and its Chinese counterpart."""

    fixed: tuple[str, ...]
    slots: tuple[str, ...]
    chinese: str

    @property
    def weight(self) -> int:
        """The number of fixed characters: of two templates that fit, the one with more of them is meant."""
        return sum(map(len, self.fixed))

    def parts(self, text: str) -> Sequence[str] | None:
        """Return what `text` has in the slots, or None where the fixed parts do not fit."""
        if not self.slots:
            return () if text == self.fixed[0] else None
        if not (text.startswith(self.fixed[0]) and text.endswith(self.fixed[-1])):
            return None
        # Before the search for what fits, which takes long where a text has many places for a part.
        start = 0
        for part in self.fixed:
            start = text.find(part, start) + len(part)
            if start < len(part):
                return None
        slots = [r"(\S+?)" if slot == "w" else "(.+?)" for slot in self.slots]
        fixed = [re.escape(part) for part in self.fixed]
        pattern = fixed[0] + "".join(s + f for s, f in zip(slots, fixed[1:], strict=True))
        found = re.fullmatch(pattern, text, re.DOTALL)
        return None if found is None else found.groups()


@dataclass(frozen=True, slots=True)
class Sentences:
    """The templates, those with the most fixed characters first."""

    templates: tuple[Template, ...]

    def translated(self, text: str) -> str | None:
        """Return the Chinese counterpart of an English text, None where there is none."""
        plain = _STOP.sub("", text)
        for template in self.templates:
            parts = template.parts(plain)
            if parts is None:
                continue
            filled = self._filled(template, parts)
            if filled is not None:
                return filled
        return None

    def _filled(self, template: Template, parts: Sequence[str]) -> str | None:
        said = []
        for slot, part in zip(template.slots, parts, strict=True):
            counterpart = self.translated(part) if slot in ("*", "+") else part
            if counterpart is None and slot == "+":
                return None
            said.append(part if counterpart is None else counterpart)
        text = ""
        for number, piece in enumerate(_PLACE.split(template.chinese)):
            text = _joined(text, said[int(piece) - 1] if number % 2 else piece)
        return text


def sentences() -> Sentences:
    """Read sentences.txt."""
    templates = [_template(english, chinese) for english, chinese in entries(_FILE, 2)]
    return Sentences(tuple(sorted(templates, key=lambda template: -template.weight)))


def _template(english: str, chinese: str) -> Template:
    pieces = _SLOT.split(_STOP.sub("", english))
    return Template(fixed=tuple(pieces[::2]), slots=tuple(pieces[1::2]), chinese=chinese)


def _joined(before: str, after: str) -> str:
    """Join two texts, with a space where a Chinese character meets a Latin letter or a digit."""
    if not before or not after:
        return before + after
    ends = (before[-1], after[0])
    meet = any(_IDEOGRAPH.match(a) and _LATIN.match(b) for a, b in (ends, ends[::-1]))
    # A piece that ends a sentence within another one leaves its full stop there.
    if before[-1] == "。" and after[0] in "；，。":
        before = before[:-1]
    return f"{before} {after}" if meet else before + after
