"""What a gold or an answer says: a number with its unit, a choice, words, a list, a tuple, or mathematics."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from covey.rewards.algebra import LONGEST_FORMULA
from covey.rewards.notation import in_brackets, split_list, squeeze, tidy, without_text_commands
from covey.rewards.quantities import FUNCTIONS, quantity, without_unit

_DEEPEST_LIST = 4
_CHOICE = re.compile(r"[(\[]?([A-Ja-f])[)\]]?\s*[.:)]?")
_CHOICE_SAID = re.compile(r"(?:[(\[]([A-J])[)\]][.:]?|([A-J])\s*[.:)])\s*(.*)", re.DOTALL)
_ANOTHER_CHOICE = re.compile(r"(?:^|\W)[A-J]\s*[.:)]|\b(?:and|or|not)\b")
_CHOICES = re.compile(r"[A-H]{2,8}|[A-H](?: [A-H]){1,7}")
_OR = re.compile(r"\bor\b|或")
_NAME = re.compile(
    r"((?:(?:m\s*)?\\angle\s*)?(?:[A-Za-z]{1,12}|\\[a-z]+)(?:_(?:\w|\{\w+\}))?'*(?:\([a-z](?:,\s*[a-z])*\))?"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\))\s*(?:=(?!=)|\\in(?![a-z]))\s*"
)
# A ratio or a time, a date, a number with its base: math-verify calculates with what their parts are.
_LITERAL = re.compile(
    r"\d+(?:\s*:\s*\d+)+(?:\s*[ap]m)?|\d{1,4}([-/])\d{1,2}\1\d{1,4}|[\dA-Fa-f]*\d_(?:\d|\{\d{1,2}\})", re.I
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([^\W\d]+)\s*(?:and\s+|,\s*)?(\d+(?:\.\d+)?)\s*([^\W\d]+)")
_ALL_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{(?:[^{}]|\{[^{}]*\})*\}")
_WORD = re.compile(r"[^\W\d_]+")
_OPERATORS = re.compile(r"[\\=+*/^_<>{}|~]")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-z])")
_DOWNWARDS = re.compile(r"\s*(>|\\ge(?![a-z]))\s*")
# A calculation that was done: its result alone is the answer.
_DONE = re.compile(r"[\d\s+\-*/().,^%$]*(?:\\(?:times|cdot|div|pm)[\d\s+\-*/().,^%$]*)*=")
_SET_BUILDER = re.compile(r"\\?\{\s*([a-zA-Z])(?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*[|:]\s*(.*?)\s*\\?\}")
_DIGITS = {c: n for n, c in enumerate("零一二三四五六七八九")} | {"两": 2}
_PART_OF = re.compile(r"(百|[零一二两三四五六七八九十]{1,3})分之([零一二两三四五六七八九十百]{1,4})")


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
    if squeeze(text) in ("{}", "\\{\\}"):
        return Value(kind=Kind.MATHS, text="\\emptyset")
    if not any(c.isalnum() for c in text) or len(text) > LONGEST_FORMULA:
        return Value(kind=Kind.NOTHING, text=squeeze(text))
    plain = without_text_commands(text)
    if _ALL_TEXT.fullmatch(text):
        text = plain
    simple = _simple(text, plain)
    if simple is not None:
        return simple
    if depth < _DEEPEST_LIST:
        shorter = _shortened(text)
        if shorter is not None:
            return _read(shorter, depth + 1)
        named = _NAME.match(text)
        if named and not RELATION.search(text):
            rest = text[named.end() :]
            rest = _shortened(rest) or rest
            if rest and "=" not in rest:
                return _named(squeeze(named[1]), _read(rest, depth + 1))
        several = _several(text, plain, depth)
        if several is not None:
            return several
        bare = without_unit(text)
        if bare != text:
            return _read(bare, depth + 1)
    if _is_words(plain):
        return _words(plain)
    return Value(kind=Kind.MATHS, text=_upwards(squeeze(text)))


def _simple(text: str, plain: str) -> Value | None:
    """A choice, several, a number or a literal; else None."""
    choice = choice_of(plain)
    if choice and choice in plain:
        said = _CHOICE_SAID.fullmatch(plain.strip("* "))
        option = (_read(said[3].strip(), _DEEPEST_LIST),) if said and said[3].strip() else ()
        return Value(kind=Kind.CHOICE, text=choice, items=option)
    number = quantity(text) or quantity(plain)
    if number is not None:
        return Value(kind=Kind.NUMBER, text=squeeze(text), number=number.number, unit=number.unit)
    letters = plain.replace(" ", "")
    if _CHOICES.fullmatch(plain) and len(set(letters)) == len(letters):
        return _list(text, tuple(Value(kind=Kind.CHOICE, text=letter) for letter in letters))
    if _LITERAL.fullmatch(plain):
        return Value(kind=Kind.WORDS, text="".join(squeeze(plain).split()).casefold())
    span = _SPAN.fullmatch(plain)
    spans = [quantity(f"{span[i]} {span[i + 1]}") for i in (1, 3)] if span else []
    if len({q.unit for q in spans if q is not None and q.unit}) == 2:
        return Value(kind=Kind.WORDS, text=" ".join(f"{q.number} {q.unit}" for q in spans if q is not None))
    part = _PART_OF.fullmatch(plain)
    if part:
        below, above = (100 if p == "百" else _chinese(p) for p in (part[1], part[2]))
        return Value(kind=Kind.NUMBER, text=text, number=Fraction(above, below)) if below else None
    return None


def _chinese(numeral: str) -> int:
    """A number below 100 in Chinese: 二十三 is 23."""
    tens, ten, ones = numeral.rpartition("十")
    return 10 * (_DIGITS.get(tens, 1) if ten else 0) + _DIGITS.get(ones, 0)


def _shortened(text: str) -> str | None:
    r"""The condition of a set, the result of a calculation, the exact side of `1/3 \approx 0.333`; else
    None."""
    condition = _SET_BUILDER.fullmatch(text)
    if condition:
        return condition[2]
    done = _DONE.match(text)
    if done and any(c.isdigit() for c in done[0]) and text[done.end() :].strip():
        return text[done.end() :].strip()
    turned = re.fullmatch(r"([^=]*\d[^=]*)=\s*([a-zA-Z])", text)
    if turned:
        return f"{turned[2]} = {turned[1].strip()}"
    exact, _, rounded = text.partition("\\approx")
    if rounded.strip():
        name = re.fullmatch(r"\s*(?:[A-Za-z]+|.*=)\s*", exact)
        return rounded.strip() if name else exact.strip()
    return None


def _named(name: str, value: Value) -> Value:
    """A value with its name; of `(x, y) = (1, 2)` each item has its own."""
    names = name[1:-1].split(",") if name.startswith("(") else []
    items = value.items
    if names and value.kind is Kind.TUPLE and len(items) == len(names):
        return replace(value, items=tuple(replace(i, name=n) for n, i in zip(names, items, strict=True)))
    return value if names else replace(value, name=name)


def _words(plain: str) -> Value:
    # Between digits a point or a colon means something; a letter alone is a name, with its case.
    has_digits = any(c.isdigit() for c in plain)
    kept = "".join(c for c in plain if c.isalnum() or (has_digits and not c.isspace()))
    return Value(kind=Kind.WORDS, text=kept if len(kept) == 1 else kept.casefold())


def _upwards(text: str) -> str:
    """A chain of inequalities with its smallest member first."""
    parts = _DOWNWARDS.split(text)
    if len(parts) < 3 or re.search(r"<|\\le(?![a-z])", text):
        return text
    turned = [{">": "<", "\\ge": "\\le "}.get(p, p) for p in reversed(parts)]
    return "".join(turned)


def _several(text: str, plain: str, depth: int) -> Value | None:
    """A list, a tuple, or one value in brackets; else None."""
    inner, brackets = in_brackets(text)
    if brackets == "{}" and inner.strip() == "\\emptyset":
        return Value(kind=Kind.MATHS, text="\\{\\emptyset\\}")
    if brackets:
        parts = split_list(inner)
        items = tuple(_read(p, depth + 1) for p in parts)
        # Two in square brackets are an interval, unless they are strings.
        if brackets == "{}" or (brackets == "[]" and (len(parts) != 2 or parts[0][:1] in ("'", '"'))):
            return _list(text, items, "{}" if brackets == "{}" and len(items) > 1 else "")
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
    several = _list(text, tuple(_read(p, depth + 1) for p in parts))
    # One of several letters is no choice of all of them.
    is_either = _OR.search(plain) and all(i.kind is Kind.CHOICE for i in several.items)
    return Value(kind=Kind.WORDS, text=squeeze(plain)) if is_either else several


def _list(text: str, items: tuple[Value, ...], brackets: str = "") -> Value:
    flat = tuple(e for i in items for e in (i.items if i.kind is Kind.LIST and not i.brackets else (i,)))
    return Value(kind=Kind.LIST, text=squeeze(text), items=flat, brackets=brackets)


def _is_words(plain: str) -> bool:
    """Whether a text is in words: letters only, or a number or so among words of three letters and more."""
    words = _WORD.findall(plain)
    if not words or _OPERATORS.search(plain) or any(w.casefold() in FUNCTIONS for w in words):
        return False
    if all(len(w) == 1 and w.isascii() for w in words):
        return plain.strip("\"'*. ").isalpha()
    is_told = any(len(w) > 2 or not w.isascii() for w in words)
    return is_told or all(c.isalpha() or not c.isalnum() for c in plain)


def choice_of(plain: str) -> str:
    """The letter of `(B)`, `b`, `(B) 12` or `B. 12`; nothing where a second letter follows."""
    plain = plain.strip("* ")
    alone = _CHOICE.fullmatch(plain)
    if alone:
        return alone[1].upper()
    said = _CHOICE_SAID.fullmatch(plain)
    return said[1] or said[2] if said and not _ANOTHER_CHOICE.search(said[3]) else ""
