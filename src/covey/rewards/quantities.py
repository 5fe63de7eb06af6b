r"""Numbers with their units: `-3 1/2 cm`, `\$1,000`, `0.\overline{3}`, `3.5亿`, `72 students`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from covey.rewards.notation import without_text_commands

_LONGEST = 100
_LARGEST_EXPONENT = 300

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?![\d])|\d+)(?:\.\d*)?|\.\d+"
_SIGNED = rf"[-+]?\s*(?:{_DIGITS})"
_FRACTION = rf"\\frac\s*(?:\{{\s*(?:{_SIGNED})\s*\}}|\d)\s*(?:\{{\s*(?:{_SIGNED})\s*\}}|\d)"
_TIMES_TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*[-+]?\d{1,4}\s*\}?"
_REPEATING = r"\d*\.\d*\s*(?:\\overline\s*\{\s*\d+\s*\}|\\dot\s*\{?\d\}?(?:\d*\s*\\dot\s*\{?\d\}?)?)"
_NUMBER = (
    rf"{_REPEATING}|(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}|\s*{_TIMES_TEN})|10\s*\^\s*\{{?\s*[-+]?\d{{1,4}}\s*\}}?"
    rf"|(?:\d+\s*)?{_FRACTION}|\d+\s+\d+\s*/\s*\d+|(?:{_DIGITS})\s*/\s*(?:{_DIGITS})|{_DIGITS}"
)
_UNIT_WORD = r"(?:[^\W\d_]|[°$€£¥₹])+"
_UNIT = (
    rf"\\?%|\\(?:text|mathrm|mbox|operatorname|rm)\s*\{{(?:[^{{}}\d]|\^-?\d){{1,40}}\}}(?:\^\{{?[23]\}}?)?"
    rf"|{_UNIT_WORD}(?: {_UNIT_WORD}){{0,3}}(?:\^\{{?[23]\}}?)?(?: ?/ ?{_UNIT_WORD}(?:\^\{{?[23]\}}?)?)?"
)
_SCALES = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"dozen": 12, "万": 10**4, "亿": 10**8, "万亿": 10**12},
}
_SCALE = re.compile(r"万亿|[万亿]|(?:hundred|thousand|million|billion|trillion|dozen)s?(?![^\W\d_])", re.I)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<coin>\\?[$€£¥₹]?)\s*(?P<sign2>[-+]?)\s*(?P<number>{_NUMBER})"
    rf"(?P<space>\s*)(?P<unit>{_UNIT})?"
)
_WORD = re.compile(r"[^\W\d_]+")
FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "lg", "exp"),
        *("lim", "max", "min", "gcd", "lcm", "sqrt", "pi", "mod"),
    )
)
# Behind a number these make another one, or no single one.
_NO_NOUNS = frozenset(
    (
        *("and", "or", "not", "but", "plus", "minus", "times", "squared", "cubed", "factorial", "over"),
        *("choose", "modulo", "half", "less", "more", "fewer", "below", "above", "to", "is", "are", "equals"),
        *("或", "和", "且", "分之", "的"),
    )
)

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
        "km/hour kmh kph",
        "mile/hour mph",
        "角",
        "分",
        "rad radian",
        "pa pascal",
        "hz hertz",
        "n newton",
        "j joule",
        "w watt",
        "v volt",
        "ampere amp",
        "ω ohm",
        "ev",
        "nm",
        "mol mole",
        "k kelvin",
        "atm",
    )
    for name in names.split()
}

_PROSE_UNIT = re.compile(
    rf"\s?({'|'.join(sorted((n for n in _KNOWN_UNITS if not n.isascii()), key=len, reverse=True))}"
    r"|(?:square |cubic )?[a-zA-Z°]+(?:\^\{?[23]\}?)?(?:\s?/\s?[a-zA-Z]+|\s+per\s+[a-z]+)?(?!\w))"
)
_WORDS_TOO = frozenset(
    ("in", "a", "r", "n", "j", "w", "v", "k", "pa", "unit", "units", "min", "sec", "bucks")
)
_ABOUT = re.compile(r"^(?:大?约|USD|RMB)\s*")
_IN_BRACKETS = re.compile(r"(?<=\d)\s*\(([^\W\d]+)\)$")
# They count things, and say no more than the number.
_COUNTERS = re.compile("^[个只人本名种次棵张页支辆件条位岁](?!方)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit by one name, "" where it has none; a noun is a unit too: `72 students`."""

    number: Fraction
    unit: str


def quantity(text: str) -> Quantity | None:
    """A tidied text as a number with sign, currency and unit; else None."""
    # The length is limited because the text is a policy's: a number of a million digits takes minutes.
    if len(text) > _LONGEST:
        return None
    text = _ABOUT.sub("", text)
    match = _QUANTITY.fullmatch(_IN_BRACKETS.sub(r" \1", text) if text.endswith(")") else text)
    if match is None:
        return None
    number = _number(match["number"])
    words, scale = match["unit"] or "", 1
    scaled = _SCALE.match(without_text_commands(words))
    if scaled is not None:
        scale = _SCALES[scaled[0].lower().removesuffix("s")]
        words = without_text_commands(words)[scaled.end() :].strip()
    unit = _unit(words, bool(match["space"]) or scaled is not None)
    if number is None or unit is None:
        return None
    if "-" in (match["sign"], match["sign2"]):
        number = -number
    return Quantity(number * scale, unit or _KNOWN_UNITS.get(match["coin"].strip("\\"), ""))


def unit_end(text: str, start: int) -> int:
    """Where a scale and a unit of the table end that stand behind a number in prose; `start` without any.

    Letters that are words too, such as in and a, are left out.
    """
    end = start
    scaled = re.compile(rf"\s?(?:{_SCALE.pattern})", re.I).match(text, start)
    if scaled is not None:
        end = scaled.end()
    words = _PROSE_UNIT.match(text, end)
    if words is not None and words[1].casefold() not in _WORDS_TOO:
        parts = re.split(r"\s?/\s?|\s+per\s+", words[1].casefold())
        if all(_known_unit(re.sub(r"\^\{?([23])\}?$", r"^\1", p), may_be_short=True) for p in parts):
            return words.end()
    return end


def without_unit(text: str) -> str:
    """A closed formula without the unit of the table behind it: `9\\pi cm^2`."""
    match = re.fullmatch(r"(.*(?:[\d})]|\\pi|\\sqrt ?\d))\s+([^\s=+\\-]+(?: ?/ ?\w+)?)", text)
    if match is None or not re.search(r"[\\^]", match[1]) or not match[2][0].isalpha():
        return text
    return match[1] if unit_end(match[2], 0) == len(match[2]) else text


def _unit(text: str, is_apart: bool) -> str | None:
    """A unit by its one name; None where the letters may be factors."""
    if not text:
        return ""
    if text.endswith("%"):
        return "percent"
    is_text = text.startswith("\\")
    plain = without_text_commands(text).replace("{", "").replace("}", "").casefold()
    name = "".join(plain.replace(" per ", "/").split(" of ")[0].split())
    parts = [_known_unit(part, may_be_short=is_apart or is_text or "/" in name) for part in name.split("/")]
    if all(parts):
        joined = "/".join(parts)
        return _KNOWN_UNITS.get(joined, joined)
    words = set(_WORD.findall(plain))
    if words & _NO_NOUNS or words & FUNCTIONS or name.startswith("的"):
        return None
    if not (is_text or not plain.isascii() or (is_apart and max(map(len, words)) > 2)):
        return None
    return _COUNTERS.sub("", name).removesuffix("s")


def _known_unit(name: str, *, may_be_short: bool) -> str:
    """A unit of the table by its one name, or nothing."""
    for form in (name, name.removesuffix("s"), name.removesuffix(".")):
        if form in _KNOWN_UNITS and (may_be_short or len(form) > 1 or not form.isascii()):
            return _KNOWN_UNITS[form]
    return ""


def _number(text: str) -> Fraction | None:
    """The value of what `_NUMBER` has matched: a decimal, fraction, mixed number or power of ten."""
    text = text.replace(",", "")
    repeating = re.fullmatch(r"(\d*)\.(\d*)\s*\\(overline|dot)(.*)", text)
    if repeating:
        return _repeating(repeating[1], repeating[2], "".join(re.findall(r"\d", repeating[4])))
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


def _repeating(whole: str, before: str, period: str) -> Fraction:
    """The decimal `whole.before` with digits behind it that repeat."""
    return Fraction(int(whole + before + period or "0") - int(whole + before or "0")) / (
        10 ** len(before) * (10 ** len(period) - 1)
    )
