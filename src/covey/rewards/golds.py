"""Which golds can be compared with an answer, and why the others cannot."""

from __future__ import annotations

import functools
import math
import re
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from covey.rewards.algebra import ALGEBRA, LONGEST_FORMULA
from covey.rewards.answers import extract_gold
from covey.rewards.gold_texts import GoldLists, UnreadableGold, gold_texts, shown
from covey.rewards.values import Kind, Value, read
from covey.texts import tr

_LONGEST_PROSE = 200
# Golds whose check is remembered: many rows may have the same one.
_REMEMBERED = 1_000
_SENTENCES = re.compile(r"\w[.。]\s*[A-Z\u4e00-\u9fff].*\s.*\w[.。]?\s*$", re.DOTALL)
# Notations that math-verify does not read: equal where they are written alike.
_AS_TEXT = re.compile(
    r"(?=.*(?:\\(?:cap|cup|land|lor|neg|lnot|wedge|vee|parallel|perp|cong|sim|subset|subseteq|notin|l?dots|cdots"
    r"|mathbb|triangle|lg|binom)(?![a-zA-Z])|\d{4,}!))(?:[^\\]|\\[{}]|\\(?!int|lim|prod)[a-zA-Z]+)+",
    re.DOTALL,
)
_NO_GOLDS = frozenset(
    ("proof", "see proof", "proof omitted", "see solution", "略", "证明略", "见证明", "见解析")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldReport:
    """The result of checking the golds; rows are counted from 0, and a row without a gold is not checked."""

    num_golds: int
    num_checked: int
    bad: list[tuple[int, str, str]]


def gold_problem(text: str) -> str | None:
    """Why the gold of a column's text cannot be compared with an answer; None where it can."""
    gold = extract_gold(text)
    value = read(gold)
    return _plain_problem(gold, value) or _unread(value)


def check_golds(golds: Iterable[Any], budget_s: float = 5.0, lists: GoldLists | None = None) -> GoldReport:
    """Check all golds that need no math-verify, then, for `budget_s`, the others in a fixed order.

    A gold with alternatives is bad where none of them can be read. The seconds count from the first formula's
    answer: it waits for the child to start.
    """
    ends = math.inf if budget_s > 0 else 0.0
    bad: list[tuple[int, str, str]] = []
    formulas: list[tuple[int, Any, tuple[str, ...]]] = []
    num_golds = num_checked = 0
    looked_at = functools.lru_cache(_REMEMBERED)(_looked_at)
    for row, gold in enumerate(golds):
        if gold is None:
            continue
        num_golds += 1
        why, unread = _without_formulas(gold, lists, looked_at)
        if unread:
            formulas.append((row, gold, unread))
            continue
        num_checked += 1
        if why is not None:
            bad.append((row, shown(gold), why))
    for row, gold, unread in sorted(
        formulas, key=lambda f: zlib.crc32(repr(f[2]).encode("utf-8", "replace"))
    ):
        if time.monotonic() > ends:
            break
        num_checked += 1
        whys = [_unread(read(extract_gold(text))) for text in unread]
        ends = min(ends, time.monotonic() + budget_s)
        if None not in whys:
            bad.append((row, shown(gold), str(whys[0])))
    return GoldReport(num_golds=num_golds, num_checked=num_checked, bad=sorted(bad))


def _without_formulas(
    gold: Any, lists: GoldLists | None, looked_at: Callable[[str], tuple[str | None, bool]]
) -> tuple[str | None, tuple[str, ...]]:
    """Why no alternative of a gold can be read, None where one can; and, where that is up to math-verify, the
    alternatives that it is to read."""
    try:
        texts = gold_texts(gold, lists)
    except UnreadableGold as error:
        return str(error), ()
    looks = [(text, *looked_at(text)) for text in texts]
    hopeful = [(text, has_formulas) for text, why, has_formulas in looks if why is None]
    if not hopeful:
        return looks[0][1], ()
    return None, tuple(text for text, _ in hopeful) if all(has for _, has in hopeful) else ()


def _looked_at(text: str) -> tuple[str | None, bool]:
    """What is wrong with the gold of a column's text, without math-verify, and whether that is to read it."""
    gold = extract_gold(text)
    value = read(gold)
    return _plain_problem(gold, value), bool(_formulas(value))


def _plain_problem(gold: str, value: Value) -> str | None:
    """What is wrong with a gold that can be seen without math-verify."""
    if not gold:
        return tr("it is empty")
    is_words = value.kind is Kind.WORDS or all(i.kind is Kind.WORDS for i in value.items or [value])
    is_prose = is_words and (len(gold) > _LONGEST_PROSE or _SENTENCES.search(gold))
    if len(gold) > LONGEST_FORMULA or is_prose:
        return tr("it is a text of {num_gold} characters in which no answer is marked", num_gold=len(gold))
    if gold.strip(" .。").casefold() in _NO_GOLDS:
        return tr("it says that the answer is a proof, and contains no other answer")
    if value.kind is Kind.NOTHING or any(i.kind is Kind.NOTHING for i in value.items):
        return tr("it contains no letter or digit")
    if value.text in ("nan", "null"):
        return tr("it is a missing value")
    bare = re.sub(r"\\.", "", gold.replace("\\left", "").replace("\\right", ""))
    if bare.count("{") != bare.count("}"):
        return tr("it has a brace that is not closed")
    if gold.count("\\left") - gold.count("\\leftarrow") != gold.count("\\right") - gold.count("\\rightarrow"):
        return tr("it holds \\left without \\right")
    if re.search(r"\\frac\s*(?:\{[^{}]*\}|\d)?\s*$", gold):
        return tr("it ends in \\frac without its two parts")
    if re.search(r"[-+*/^_=<>]$", value.text):
        return tr("it ends in an operator")
    return None


def _unread(value: Value) -> str | None:
    formulas = (f for f in _formulas(value) if not _AS_TEXT.fullmatch(f))
    unread = next((f for f in formulas if not ALGEBRA.parses(f)), None)
    return None if unread is None else tr("math-verify cannot read {unread:.80}", unread=unread)


def _formulas(value: Value) -> list[str]:
    """The parts of a value that math-verify is to read."""
    parts = [f for item in value.items for f in _formulas(item)]
    return [value.text, *parts] if value.kind is Kind.MATHS else parts
