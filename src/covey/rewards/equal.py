r"""Whether an answer means what a gold means.

Both are read into a value: a number with its unit, a choice letter, words, a list, a tuple, or mathematics;
the mathematics alone goes to math-verify. Where two readings are possible these hold:

- A percent agrees with the number it shows and the number it is: 50% with 50, with 0.5 and with 1/2.
- A unit may be left out. An answer may add one that is known or set as text; where both have one they agree.
- A comma list is the same in any order, written with commas, "and", "or" or in braces; in brackets order
  counts.
- A name before "=" may be left out. Where both have one they agree.
- Ratios, times, dates and numbers in a base are compared as they are written.
- Words are the same without regard to case, punctuation and spaces; yes is not true.
- The equal of a number is a number, in LaTeX if need be: `12+45` is no answer to a question whose gold is 57,
  or a policy would learn to give the question back.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from covey.rewards.algebra import ALGEBRA, LONGEST_FORMULA
from covey.rewards.notation import in_brackets, split_list, squeeze, tidy, without_text_commands

_LONGEST_NUMBER = 100
_LARGEST_EXPONENT = 300
_DEEPEST_LIST = 4
# Longer lists are compared in the order they have.
_LONGEST_BAG = 12
# What the mathematics of one answer may take, all its parts together.
_PATIENCE_S = 4.0

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?![\d])|\d+)(?:\.\d*)?|\.\d+"
_SIGNED = rf"[-+]?\s*(?:{_DIGITS})"
_FRACTION = rf"\\frac\s*(?:\{{\s*(?:{_SIGNED})\s*\}}|\d)\s*(?:\{{\s*(?:{_SIGNED})\s*\}}|\d)"
_TIMES_TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*[-+]?\d{1,4}\s*\}?"
_NUMBER = (
    rf"(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}|\s*{_TIMES_TEN})|10\s*\^\s*\{{?\s*[-+]?\d{{1,4}}\s*\}}?"
    rf"|(?:\d+\s*)?{_FRACTION}|\d+\s+\d+\s*/\s*\d+|(?:{_DIGITS})\s*/\s*(?:{_DIGITS})|{_DIGITS}"
)
_UNIT_WORD = r"(?:[^\W\d_]|[°$€£¥₹])+"
_UNIT = (
    rf"\\?%|\\(?:text|mathrm|mbox|operatorname|rm)\s*\{{[^{{}}\d]{{1,40}}\}}(?:\^\{{?[23]\}}?)?"
    rf"|{_UNIT_WORD}(?: {_UNIT_WORD}){{0,3}}(?:\^\{{?[23]\}}?)?(?: ?/ ?{_UNIT_WORD}(?:\^\{{?[23]\}}?)?)?"
)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<coin>\\?[$€£¥₹]?)\s*(?P<sign2>[-+]?)\s*(?P<number>{_NUMBER})"
    rf"(?P<space>\s*)(?P<unit>{_UNIT})?"
)
_CHOICE = re.compile(r"[(\[]?([A-Ja-j])[)\]]?\s*[.:)]?")
_CHOICE_SAID = re.compile(r"(?:[(\[]([A-J])[)\]][.:]?|([A-J])\s*[.:)])\s*(.*)", re.DOTALL)
_ANOTHER_CHOICE = re.compile(r"(?:^|\W)[A-J]\s*[.:)]|\b(?:and|or|not)\b")
_NAME = re.compile(
    r"((?:(?:m\s*)?\\angle\s*)?(?:[A-Za-z]{1,12}|\\[a-z]+)(?:_(?:\w|\{\w+\}))?'*(?:\([a-z](?:,\s*[a-z])*\))?)"
    r"\s*(?:=(?!=)|\\in(?![a-z]))\s*"
)
# A ratio or a time, a date, a number with its base: math-verify calculates with what their parts are.
_LITERAL = re.compile(r"\d+(?:\s*:\s*\d+)+|\d{1,4}([-/])\d{1,2}\1\d{1,4}|[\dA-Fa-f]*\d_(?:\d|\{\d{1,2}\})")
_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "ln",
        "exp",
        "lim",
        "max",
        "min",
        "gcd",
        "lcm",
        "sqrt",
        "pi",
    )
)
_WORD = re.compile(r"[^\W\d_]+")
_OPERATORS = re.compile(r"[\\=+*/^_<>{}|~]")
# A closed form of a number, that is, with no sum or product left to do.
_CLOSED = re.compile(r"-?\s*\d*\s*\\(?:frac|sqrt)[^+*=]*")
_WORK = re.compile(r"\\(?:times|cdot|div|pm|mp)(?![a-z])|[\d})]\s*-")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-z])")

_KNOWN_UNITS = {
    name: names.split()[0]
    for names in (
        "percent percentage pct",
        "degree ° deg 度",
        "°c celsius 摄氏度",
        "°f fahrenheit",
        "dollar $ usd buck 美元",
        "cent",
        "euro € eur 欧元",
        "pound £ gbp 英镑",
        "yuan ¥ rmb cny 元 块 人民币",
        "rupee ₹ r",
        "cm centimeter centimetre 厘米",
        "mm millimeter millimetre 毫米",
        "m meter metre 米",
        "km kilometer kilometre 千米 公里",
        "inch inche in",
        "foot feet ft",
        "mile mi",
        "yard yd",
        "g gram 克",
        "kg kilogram 千克 公斤",
        "mg milligram",
        "lb lbs",
        "ounce oz",
        "l liter litre 升",
        "ml milliliter millilitre 毫升",
        "s second sec 秒",
        "minute min 分钟",
        "hour hr h 小时 时",
        "day 天",
        "week 周",
        "month 月",
        "year 年",
        "mph",
        "unit",
        "squareunit unit^2",
        "cubicunit unit^3",
        "cm^2 squarecm squarecentimeter 平方厘米",
        "m^2 squaremeter squaremetre 平方米",
        "km^2 squarekm squarekilometer",
        "ft^2 squarefeet squarefoot",
        "inch^2 squareinch squareinche",
        "cm^3 cubiccm cubiccentimeter 立方厘米",
        "m^3 cubicmeter cubicmetre 立方米",
        "km/h kmh kph",
        "m/s",
        "rad radian",
        "个 只 人 本 名 种 次 棵 张 页 支 辆 件 条 位 岁",
    )
    for name in names.split()
}


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
    is_unit_known: bool = True
    brackets: str = ""
    items: tuple[Value, ...] = ()


def is_equal(gold: str, answer: str | None) -> bool:
    """Whether an answer means what a gold means; an answer of None means nothing."""
    if answer is None:
        return False
    wanted, found = read(gold), read(answer)
    if Kind.NOTHING in (wanted.kind, found.kind):
        return False
    if wanted.kind is Kind.CHOICE:
        return wanted.text == _choice(without_text_commands(tidy(answer)))
    return _same(wanted, found, time.monotonic() + _PATIENCE_S)


def read(text: str) -> Value:
    """A gold or an answer as a value; a text longer than any answer is nothing."""
    if len(text) > 2 * LONGEST_FORMULA:
        return Value(kind=Kind.NOTHING, text="")
    return _read(tidy(text), 0)


def _read(text: str, depth: int) -> Value:
    if not any(c.isalnum() for c in text) or len(text) > LONGEST_FORMULA:
        return Value(kind=Kind.NOTHING, text=squeeze(text))
    plain = without_text_commands(text)
    choice = _choice(plain)
    if choice and choice in plain:
        return Value(kind=Kind.CHOICE, text=choice)
    quantity = _quantity(text) or _quantity(plain)
    if quantity is not None:
        return quantity
    if _LITERAL.fullmatch(plain):
        return Value(kind=Kind.WORDS, text=squeeze(plain))
    named = _NAME.match(text)
    if named and not _RELATION.search(text):
        rest = text[named.end() :]
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
    parts = split_list(text if _RELATION.search(text) or "\\" in text else plain)
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
    if not words or _OPERATORS.search(plain) or any(w.casefold() in _FUNCTIONS for w in words):
        return False
    return all(c.isalpha() or not c.isalnum() for c in plain) or any(len(w) > 2 for w in words)


def _choice(plain: str) -> str:
    """The letter of `(B)`, `b`, `(B) 12` or `B. 12`; nothing where a second letter follows."""
    plain = plain.strip("* ")
    alone = _CHOICE.fullmatch(plain)
    if alone:
        return alone[1].upper()
    said = _CHOICE_SAID.fullmatch(plain)
    return said[1] or said[2] if said and not _ANOTHER_CHOICE.search(said[3]) else ""


def _quantity(text: str) -> Value | None:
    """A number with its sign, currency and unit; else None."""
    # The length is limited because the text is a policy's: a number of a million digits takes minutes.
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return None
    number = _number(match["number"])
    unit, known = _unit(match["unit"] or "", bool(match["space"]))
    if number is None or unit is None:
        return None
    coin = match["coin"].strip("\\")
    if "-" in (match["sign"], match["sign2"]):
        number = -number
    unit = unit or _KNOWN_UNITS.get(coin, "")
    return Value(kind=Kind.NUMBER, text=squeeze(text), number=number, unit=unit, is_unit_known=known)


def _unit(text: str, is_apart: bool) -> tuple[str | None, bool]:
    """A unit by its one name and whether it is known to be one; None where the letters may be factors."""
    if not text:
        return "", True
    if text == "%":
        return "percent", True
    is_text = text.startswith("\\")
    plain = without_text_commands(text).replace("{", "").replace("}", "").casefold()
    name = "".join(plain.split())
    for form in (name, name.removesuffix("s"), name.removesuffix("."), "".join(plain.split(" of ")[:1])):
        if form in _KNOWN_UNITS and (is_apart or is_text or len(form) > 1 or not form.isascii()):
            return _KNOWN_UNITS[form], True
    words = set(_WORD.findall(plain))
    if words & {"and", "or", "not"} or words & _FUNCTIONS:
        return None, False
    if is_text:
        return name.removesuffix("s"), True
    return (name.removesuffix("s"), False) if is_apart and max(map(len, words)) > 2 else (None, False)


def _number(text: str) -> Fraction | None:
    """The value of what `_NUMBER` has matched: a decimal, fraction, mixed number or power of ten."""
    text = text.replace(",", "")
    exponent = 0
    power = re.search(r"(?:[eE]|10\s*\^\s*\{?\s*)([-+]?\d+)\s*\}?$", text)
    if power and ("^" in text or re.search(r"\d\.?[eE]", text)):
        exponent = int(power[1])
        text = re.split(r"[eE\\*x]|(?<!\d)10\s*\^", text, maxsplit=1)[0].strip() or "1"
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    parts = re.fullmatch(r"(\d+(?=\D))?\s*\\frac\s*(?:\{(.*?)\}|(\d))\s*(?:\{(.*?)\}|(\d))", text)
    mixed = re.fullmatch(r"(\d+)\s+(\d+)\s*/\s*(\d+)", text)
    try:
        if parts:
            value = _fraction(parts[2] or parts[3]) / _fraction(parts[4] or parts[5])
            return int(parts[1] or 0) + value
        if mixed and not (len(mixed[2]) == 3 and len(mixed[1]) > 3):
            return int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3]))
        above, _, below = text.partition("/")
        return _fraction(above) / _fraction(below or "1") * Fraction(10) ** exponent
    except (ValueError, ZeroDivisionError):
        return None


def _fraction(text: str) -> Fraction:
    return Fraction("".join(text.split()))


def _same(gold: Value, answer: Value, ends: float) -> bool:
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.text == answer.text and gold.unit == answer.unit:
        return True
    kinds = {gold.kind, answer.kind}
    if Kind.NOTHING in kinds:
        return False
    if kinds == {Kind.NUMBER}:
        return _same_number(gold, answer)
    if Kind.LIST in kinds:
        return _same_list(gold, answer, ends)
    if kinds == {Kind.TUPLE}:
        return gold.brackets == answer.brackets and _in_order(gold.items, answer.items, ends)
    if kinds & {Kind.WORDS, Kind.CHOICE}:
        return False
    if Kind.TUPLE in kinds and not _RELATION.search(gold.text + answer.text):
        return False
    if time.monotonic() > ends:
        return False
    if gold.kind is Kind.NUMBER and (not _CLOSED.fullmatch(answer.text) or _WORK.search(answer.text)):
        return False
    if bool(gold.name) != bool(answer.name) and "=" in gold.text + answer.text:
        return ALGEBRA.equal(_equation(gold), _equation(answer))
    return ALGEBRA.equal(gold.text, answer.text)


def _equation(value: Value) -> str:
    return f"{value.name}={value.text}" if value.name else value.text


def _same_number(gold: Value, answer: Value) -> bool:
    assert gold.number is not None and answer.number is not None
    units = {gold.unit, answer.unit} - {""}
    if len(units) > 1 or (answer.unit and not gold.unit and not answer.is_unit_known):
        return False
    if gold.number == answer.number:
        return True
    if units != {"percent"} or gold.unit == answer.unit:
        return False
    return gold.number / answer.number == (100 if gold.unit else Fraction(1, 100)) if answer.number else False


def _same_list(gold: Value, answer: Value, ends: float) -> bool:
    if Kind.TUPLE in (gold.kind, answer.kind) and "cup" not in (gold.brackets, answer.brackets):
        return {gold.brackets, answer.brackets} == {"", "()"} and _in_order(gold.items, answer.items, ends)
    wanted, found = gold.items or (gold,), list(answer.items or (answer,))
    if len(wanted) != len(found):
        return False
    # 1, 2 for a = 1, b = 2: with the names left out, the order says which is which.
    is_named = len({w.name for w in wanted}) > 1 and not any(f.name for f in found)
    if is_named or len(wanted) > _LONGEST_BAG:
        return _in_order(wanted, tuple(found), ends)
    for item in wanted:
        match = next((f for f in found if _same(item, f, ends)), None)
        if match is None:
            return False
        found.remove(match)
    return True


def _in_order(wanted: tuple[Value, ...], found: tuple[Value, ...], ends: float) -> bool:
    return len(wanted) == len(found) and all(_same(w, f, ends) for w, f in zip(wanted, found, strict=True))
