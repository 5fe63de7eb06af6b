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
from fractions import Fraction

from covey.rewards.algebra import ALGEBRA
from covey.rewards.notation import tidy, without_text_commands
from covey.rewards.values import RELATION, Kind, Value, choice_of, read

# Longer lists are compared in the order they have.
_LONGEST_BAG = 12
# What the mathematics of one answer may take, all its parts together.
_PATIENCE_S = 12.0
# A closed form of a number, that is, with no sum or product left to do.
_CLOSED = re.compile(r"-?\s*\d*\s*\\(?:frac|sqrt)[^+*=]*")
_WORK = re.compile(r"\\(?:times|cdot|div|pm|mp)(?![a-z])|[\d})]\s*-")


def is_equal(gold: str, answer: str | None) -> bool:
    """Whether an answer means what a gold means; an answer of None means nothing."""
    if answer is None:
        return False
    expected, actual = read(gold), read(answer)
    if Kind.NOTHING in (expected.kind, actual.kind):
        return False
    ends = time.monotonic() + _PATIENCE_S
    if expected.kind is Kind.CHOICE:
        # `(B) 12` names its text as well.
        is_option = (
            bool(expected.items) and actual.kind is not Kind.CHOICE and _same(expected.items[0], actual, ends)
        )
        return is_option or expected.text == choice_of(without_text_commands(tidy(answer)))
    if actual.kind is Kind.CHOICE and actual.items:
        return _same(expected, actual.items[0], ends)
    if actual.kind is Kind.WORDS and expected.items and all(i.kind is Kind.CHOICE for i in expected.items):
        return sorted(actual.text.upper()) == sorted(i.text for i in expected.items)
    return _same(expected, actual, ends)


def _same(gold: Value, answer: Value, ends: float) -> bool:
    if gold.name and answer.name and not _is_same_name(gold.name, answer.name):
        return False
    if gold.text == answer.text and gold.unit == answer.unit:
        return True
    kinds = {gold.kind, answer.kind}
    if Kind.NOTHING in kinds:
        return False
    if kinds == {Kind.NUMBER}:
        return _same_number(gold, answer)
    if kinds == {Kind.LIST, Kind.MATHS} and "cup" in (gold.brackets, answer.brackets):
        return ALGEBRA.equal(gold.text, answer.text)
    if Kind.LIST in kinds:
        return _same_list(gold, answer, ends)
    if kinds == {Kind.TUPLE}:
        return gold.brackets == answer.brackets and _in_order(gold.items, answer.items, ends)
    if kinds == {Kind.WORDS, Kind.NUMBER}:
        return _is_ratio(gold, answer) or _is_ratio(answer, gold)
    if kinds & {Kind.WORDS, Kind.CHOICE}:
        return False
    if Kind.TUPLE in kinds and not RELATION.search(gold.text + answer.text):
        return False
    if time.monotonic() > ends:
        return False
    if (
        "=" in answer.text
        and "=" not in gold.text
        and not (answer.name or gold.name)
        and not RELATION.search(gold.text)
    ):
        # Where no equation is asked for, the right side of m+n = 5 is the answer, but not that of x^2 = 9.
        left, _, right = answer.text.rpartition("=")
        side = read(right)
        if side.kind is Kind.NOTHING or (_is_equation(left, right) and not ALGEBRA.equal(left, right)):
            return False
        return _same(gold, side, ends)
    if gold.kind is Kind.NUMBER and (not _CLOSED.fullmatch(answer.text) or _WORK.search(answer.text)):
        return False
    if bool(gold.name) != bool(answer.name) and "=" in gold.text + answer.text:
        return ALGEBRA.equal(_equation(gold), _equation(answer))
    return ALGEBRA.equal(gold.text, answer.text)


def _is_equation(left: str, right: str) -> bool:
    """Whether a side says something of unknowns: x, y or z outside of a call, or a power, root or multiple of
    a letter."""
    if left.startswith(("\\int", "\\sum", "\\lim", "\\prod")):
        return False
    left = re.sub(
        r"\\(?:frac|cdot|times|angle|triangle|text|mathrm|overline|max|min)(?![a-zA-Z])|_(?:\w|\{[^{}]*\})",
        "",
        left,
    )
    left = re.sub(r"[A-Za-z]\([^()]*\)", "f", left.rpartition("=")[2])
    left = re.sub(r"(?<=[A-Z])\^\{?(?:-1|T|\d)\}?", "", left)
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", left)):
        return False
    return right == "0" or re.search(r"[xyz]|\^|\\[a-z]+|\d", left) is not None


def _is_same_name(gold: str, answer: str) -> bool:
    """Whether two names are one, apart from the numbers of roots: x and x_1."""
    return gold == answer or (
        "_" not in gold and re.fullmatch(re.escape(gold) + r"_\{?\d\}?", answer) is not None
    )


def _is_ratio(words: Value, number: Value) -> bool:
    """Whether a ratio `1:2` and a number written as a fraction are the same."""
    sides = re.fullmatch(r"(\d{1,9}):(\d{1,9})", words.text)
    if sides is None or number.unit or not re.search(r"/|\\frac", number.text) or int(sides[2]) == 0:
        return False
    return number.number == Fraction(int(sides[1]), int(sides[2]))


def _equation(value: Value) -> str:
    return f"{value.name}={value.text}" if value.name else value.text


def _same_number(gold: Value, answer: Value) -> bool:
    assert gold.number is not None and answer.number is not None
    units = {gold.unit, answer.unit} - {""}
    if len(units) > 1:
        return False
    if gold.number == answer.number:
        return True
    if units != {"percent"} or gold.unit == answer.unit:
        return False
    return gold.number / answer.number == (100 if gold.unit else Fraction(1, 100)) if answer.number else False


def _same_list(gold: Value, answer: Value, ends: float) -> bool:
    if Kind.TUPLE in (gold.kind, answer.kind) and "cup" not in (gold.brackets, answer.brackets):
        return {gold.brackets, answer.brackets} == {"", "()"} and _in_order(gold.items, answer.items, ends)
    gold_items, answer_items = gold.items or (gold,), list(answer.items or (answer,))
    if len(gold_items) != len(answer_items):
        return False
    # 1, 2 for a = 1, b = 2: with the names left out, the order says which is which.
    is_named = len({w.name for w in gold_items}) > 1 and not any(f.name for f in answer_items)
    if is_named or len(gold_items) > _LONGEST_BAG:
        return _in_order(gold_items, tuple(answer_items), ends)
    for item in gold_items:
        match = next((f for f in answer_items if _same(item, f, ends)), None)
        if match is None:
            return False
        answer_items.remove(match)
    return True


def _in_order(gold_items: tuple[Value, ...], answer_items: tuple[Value, ...], ends: float) -> bool:
    if len(gold_items) != len(answer_items):
        return False
    return all(_same(g, a, ends) for g, a in zip(gold_items, answer_items, strict=True))
