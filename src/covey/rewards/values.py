"""What a gold or an answer says: a number with its unit, a choice, words, a list, a tuple, or mathematics."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from covey.rewards.algebra import LONGEST_FORMULA
from covey.rewards.notation import in_brackets, split_list, squeeze, tidy, without_text_commands
from covey.rewards.quantities import FUNCTIONS, quantity

_DEEPEST_LIST = 4
_CHOICE = re.compile(r"[(\[]?([A-Ja-j])[)\]]?\s*[.:)]?")
_CHOICE_SAID = re.compile(r"(?:[(\[]([A-J])[)\]][.:]?|([A-J])\s*[.:)])\s*(.*)", re.DOTALL)
_ANOTHER_CHOICE = re.compile(r"(?:^|\W)[A-J]\s*[.:)]|\b(?:and|or|not)\b")
_CHOICES = re.compile(r"[A-H]{2,8}")
_NAME = re.compile(
    r"((?:(?:m\s*)?\\angle\s*)?(?:[A-Za-z]{1,12}|\\[a-z]+)(?:_(?:\w|\{\w+\}))?'*(?:\([a-z](?:,\s*[a-z])*\))?)"
    r"\s*(?:=(?!=)|\\(?:in|approx)(?![a-z]))\s*"
)
# A ratio or a time, a date, a number with its base: math-verify calculates with what their parts are.
_LITERAL = re.compile(r"\d+(?:\s*:\s*\d+)+|\d{1,4}([-/])\d{1,2}\1\d{1,4}|[\dA-Fa-f]*\d_(?:\d|\{\d{1,2}\})")
_WORD = re.compile(r"[^\W\d_]+")
_OPERATORS = re.compile(r"[\\=+*/^_<>{}|~]")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-z])")
# A calculation that was done: its result alone is the answer.
_DONE = re.compile(r"[\d\s+\-*/().,^%$]*(?:\\(?:times|cdot|div|pm)[\d\s+\-*/().,^%$]*)*=")
_SET_BUILDER = re.compile(r"\\?\{\s*([a-zA-Z])(?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*[|:]\s*(.*?)\s*\\?\}")


class Kind(Enum):
    """What a text was read as."""

    NOTHING = "nothing"
    NUMBER = "number"
    CHOICE = "choice"
    WORDS = "words"
    LIST = "list"
    TUPLE = "tuple"
    MATHS = "maths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A text as it was read: its tidied form, and what the kind of it has."""

    kind: Kind
    text: str
    name: str = ""
    number: Fraction | None = None
    unit: str = ""
    brackets: str = ""
    items: tuple[Value, ...] = ()


@functools.lru_cache(8192)
def read(text: str) -> Value:
    """A gold or an answer as a value; a text longer than any answer is nothing."""
    if len(text) > 2 * LONGEST_FORMULA:
        return Value(kind=Kind.NOTHING, text="")
    return _read(tidy(text), 0)


def _read(text: str, depth: int) -> Value:
    if not any(c.isalnum() for c in text) or len(text) > LONGEST_FORMULA:
        return Value(kind=Kind.NOTHING, text=squeeze(text))
    plain = without_text_commands(text)
    choice = choice_of(plain)
    if choice and choice in plain:
        return Value(kind=Kind.CHOICE, text=choice)
    number = quantity(text) or quantity(plain)
    if number is not None:
        return Value(kind=Kind.NUMBER, text=squeeze(text), number=number.number, unit=number.unit)
    if _CHOICES.fullmatch(plain) and "".join(sorted(set(plain))) == plain:
        return _list(text, tuple(Value(kind=Kind.CHOICE, text=letter) for letter in plain))
    if _LITERAL.fullmatch(plain):
        return Value(kind=Kind.WORDS, text=squeeze(plain).casefold())
    condition = _SET_BUILDER.fullmatch(text)
    if condition and depth < _DEEPEST_LIST:
        return _read(condition[2], depth + 1)
    done = _DONE.match(text)
    if done and depth < _DEEPEST_LIST and any(c.isdigit() for c in done[0]) and text[done.end() :].strip():
        return _read(text[done.end() :].strip(), depth + 1)
    named = _NAME.match(text)
    if named and not RELATION.search(text):
        rest = text[named.end() :]
        done = _DONE.match(rest)
        rest = rest[done.end() :].strip() if done and rest[done.end() :].strip() else rest
        if rest and "=" not in rest and depth < _DEEPEST_LIST:
            return replace(_read(rest, depth + 1), name=squeeze(named[1]))
    several = _several(text, plain, depth) if depth < _DEEPEST_LIST else None
    if several is not None:
        return several
    if _is_words(plain):
        # Between digits a point or a colon means something.
        has_digits = any(c.isdigit() for c in plain)
        kept = (c for c in plain.casefold() if c.isalnum() or (has_digits and not c.isspace()))
        return Value(kind=Kind.WORDS, text="".join(kept))
    return Value(kind=Kind.MATHS, text=squeeze(text))


def _several(text: str, plain: str, depth: int) -> Value | None:
    """A list, a tuple, or one value in brackets; else None."""
    inner, brackets = in_brackets(text)
    if brackets:
        parts = split_list(inner)
        items = tuple(_read(p, depth + 1) for p in parts)
        # Two in square brackets are an interval, unless they are strings.
        if brackets == "{}" or (brackets == "[]" and (len(parts) != 2 or parts[0][:1] in ("'", '"'))):
            return _list(text, items)
        if len(parts) > 1:
            return Value(kind=Kind.TUPLE, text=squeeze(text), items=items, brackets=brackets)
        return items[0] if items[0].kind is not Kind.MATHS else None
    if "\\begin" in text:
        return None
    parts = re.split(r"\\cup(?![a-z])", text)
    if len(parts) > 1:
        items = tuple(_read(p.strip(), depth + 1) for p in parts)
        return _list(text, items, "cup") if all(i.kind is Kind.TUPLE for i in items) else None
    parts = split_list(text if RELATION.search(text) or "\\" in text else plain)
    if len(parts) == 1 and text.count("\\pm") == 1:
        parts = [text.replace("\\pm", sign) for sign in "+-"]
    if len(parts) == 1:
        return None
    return _list(text, tuple(_read(p, depth + 1) for p in parts))


def _list(text: str, items: tuple[Value, ...], brackets: str = "") -> Value:
    flat = tuple(e for i in items for e in (i.items if i.kind is Kind.LIST and not i.brackets else (i,)))
    return Value(kind=Kind.LIST, text=squeeze(text), items=flat, brackets=brackets)


def _is_words(plain: str) -> bool:
    """Whether a text is in words: letters only, or a number or so among words of three letters and more."""
    words = _WORD.findall(plain)
    if not words or _OPERATORS.search(plain) or any(w.casefold() in FUNCTIONS for w in words):
        return False
    return all(c.isalpha() or not c.isalnum() for c in plain) or any(len(w) > 2 for w in words)


def choice_of(plain: str) -> str:
    """The letter of `(B)`, `b`, `(B) 12` or `B. 12`; nothing where a second letter follows."""
    plain = plain.strip("* ")
    alone = _CHOICE.fullmatch(plain)
    if alone:
        return alone[1].upper()
    said = _CHOICE_SAID.fullmatch(plain)
    return said[1] or said[2] if said and not _ANOTHER_CHOICE.search(said[3]) else ""
