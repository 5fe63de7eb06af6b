r"""Where gold and answer stand in a text, and which golds cannot be compared with anything."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from covey.rewards.algebra import ALGEBRA, LONGEST_FORMULA
from covey.rewards.equal import Kind, Value, read

_NUMBER = r"[-+−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?"
_MATHS = (
    r"\$\$[^$]{1,400}\$\$|\$(?![\s$])[^$\n]{0,400}[^\s$]\$(?!\d)"
    r"|\\\((?s:.{1,400}?)\\\)|\\\[(?s:.{1,400}?)\\\]"
)
_GROUP = r"\{(?:[^{}]|\{[^{}]{0,40}\}){0,80}\}"
_LATEX_NUMBER = rf"-?\d*\\(?:[dt]?frac{_GROUP}|sqrt){_GROUP}"
_EXPRESSION = re.compile(rf"{_MATHS}|{_LATEX_NUMBER}|\d+(?:\s?:\s?\d+)+|{_NUMBER}(?:\s?\\?%)?")
# 3 or 4 are two answers, though the last of them is a number.
_ALTERNATIVE = re.compile(rf"({_NUMBER})(?:\s*,\s*{_NUMBER}){{0,8}}\s*,?\s*(?:\bor\b|或者?)\s*$")
_LEAD_IN = re.compile(
    r"\b(?:answers?|option|choice)\s*(?:is|are|:|=)\s*:?|(?:答案|选项?)\s*(?:应该?)?\s*[是为:：]+", re.I
)
_SENTENCE = re.compile(r"[^\n。!?]*?(?=\.(?:\s|$)|[\n。!?]|$)")
_CHOICE = re.compile(
    r"[\s*$]*(?:\\(?:text|textbf|mathrm)\{)?\(?([A-J])\)?\}?(?=[\s*$}]*(?:$|[.,:;)。，：)]))"
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))([^\s{}$\\]+)")
_LONGEST_WORDS = 60
_LONGEST_WORD = 30
_LONGEST_PROSE = 200
# The places of a text that are searched for a last expression: an answer stands at the end.
_TAIL = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldReport:
    """What a look at the golds found; rows are counted from 0, and a row without a gold is not looked at."""

    num_golds: int
    num_checked: int
    bad: list[tuple[int, str, str]]


def extract_gold(text: str) -> str:
    """The gold of a solution text: in `<answer>`, else after the last `####`, else the last box, else all."""
    tagged = _in_tag(text)
    if tagged is not None:
        return tagged
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = last_boxed(text)
    return (boxed if boxed is not None else text).strip()


def find_answer(text: str) -> tuple[str | None, str]:
    """The answer of a completion and how it was found: `answer_tag`, `boxed`, `last_expression` or `none`."""
    tagged = _in_tag(text)
    if tagged is None and "<answer>" in text:
        tagged = text.rsplit("<answer>", 1)[1].strip()
    if tagged is not None:
        return tagged, "answer_tag"
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip(), "boxed"
    expression = _last_expression(text[-_TAIL:])
    return expression, "none" if expression is None else "last_expression"


def extract_answer(text: str) -> str | None:
    """The answer of a completion: in the last `<answer>`, else the last boxed, else its last expression."""
    return find_answer(text)[0]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or `\fbox{…}` whose braces close, or of `\boxed 5`; else None."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    found, place = None, -1
    opened: list[int] = []
    for token in _BOX.finditer(text):
        if token[0] == "}":
            begin = opened.pop() if opened else -1
            if begin >= 0:
                found, place = text[begin : token.start()], token.start()
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else -1)
    for bare in _BARE_BOX.finditer(text, max(place, 0)):
        found = bare[1].rstrip(".,;。")
    return found


def gold_problem(text: str) -> str | None:
    """Why the gold of a column's text cannot be compared with an answer; None where it can."""
    gold = extract_gold(text)
    value = read(gold)
    return _plain_problem(gold, value) or _unread(value)


def check_golds(golds: Iterable[Any], budget_s: float = 5.0) -> GoldReport:
    """Look at all golds that need no math-verify, then for `budget_s` at the others in a fixed order.

    The seconds count from the first formula's answer: it waits for the child to start.
    """
    ends = math.inf if budget_s > 0 else 0.0
    bad: list[tuple[int, str, str]] = []
    formulas: list[tuple[int, str, Value]] = []
    num_golds = num_checked = 0
    seen: dict[str, tuple[Value, str | None]] = {}
    for row, column in enumerate(golds):
        if column is None:
            continue
        num_golds += 1
        text = column_text(column)
        if text not in seen:
            gold = extract_gold(text)
            value = read(gold)
            seen[text] = value, _plain_problem(gold, value)
        value, why = seen[text]
        if why is None and _formulas(value):
            formulas.append((row, text, value))
            continue
        num_checked += 1
        if why is not None:
            bad.append((row, text, why))
    for row, text, value in sorted(formulas, key=lambda f: zlib.crc32(f[1].encode("utf-8", "replace"))):
        if time.monotonic() > ends:
            break
        num_checked += 1
        why = _unread(value)
        ends = min(ends, time.monotonic() + budget_s)
        if why is not None:
            bad.append((row, text, why))
    return GoldReport(num_golds=num_golds, num_checked=num_checked, bad=sorted(bad))


def column_text(column: Any) -> str:
    """A gold column's value as text; the members of a list make a comma list."""
    if isinstance(column, list | tuple):
        return ", ".join(str(c) for c in column)
    return str(column)


def _in_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    return text[start + len("<answer>") :].split("</answer>", 1)[0].strip()


def _last_expression(text: str) -> str | None:
    """A choice letter, word or list said to be the answer, else the last number or formula."""
    text = re.sub(r"<\|[^|<>]{1,40}\|>|\*\*", "", text)
    said = list(_LEAD_IN.finditer(text))
    if said:
        sentence = _SENTENCE.match(text, said[-1].end())
        rest = sentence[0].strip(" *:：") if sentence else ""
        choice = _CHOICE.match(rest)
        if choice:
            return choice[1]
        # Sunday, as three days pass: a reason may follow the answer.
        for part in (rest, re.split(r"[,，]", rest)[0]):
            if _is_said(read(part)) and len(part) <= _LONGEST_WORDS:
                return part
    whole = text.strip()
    items = read(whole).items if len(whole) <= _LONGEST_WORDS else ()
    if items and all(i.kind is Kind.NUMBER for i in items):
        return whole
    # What a brace closes behind is part of a formula that was not read as a whole.
    expressions = [e for e in _EXPRESSION.finditer(text) if text[e.end() : e.end() + 1] != "}"]
    if expressions:
        last = expressions[-1]
        before = _ALTERNATIVE.search(text, max(0, last.start() - 80), last.start())
        return text[before.start() : last.end()] if before else _bare(last[0])
    return whole if whole and not re.search(r"\s", whole) and len(whole) <= _LONGEST_WORDS else None


def _is_said(value: Value) -> bool:
    """Whether what follows "the answer is" is a whole answer: a word or a few, a tuple, a list of such."""
    if value.kind is Kind.LIST:
        return all(i.kind is not Kind.WORDS or _is_said(i) for i in value.items)
    return value.kind is Kind.TUPLE or (
        value.kind is Kind.WORDS and len(value.text) <= _LONGEST_WORD and not re.search(r"\d", value.text)
    )


def _bare(expression: str) -> str:
    if expression.startswith(("\\(", "\\[")):
        return expression[2:-2].strip()
    return expression.strip("$").strip() if expression.startswith("$") else expression


def _plain_problem(gold: str, value: Value) -> str | None:
    """What is wrong with a gold that can be seen without math-verify."""
    if not gold:
        return "it is empty"
    if len(gold) > LONGEST_FORMULA or (value.kind is Kind.WORDS and len(gold) > _LONGEST_PROSE):
        return f"it is {len(gold)} characters of text, in which no answer is marked"
    if value.kind is Kind.NOTHING or any(i.kind is Kind.NOTHING for i in value.items):
        return "it holds no letter or digit"
    if value.text in ("nan", "null"):
        return "it is a missing value"
    bare = re.sub(r"\\.", "", gold.replace("\\left", "").replace("\\right", ""))
    if bare.count("{") != bare.count("}"):
        return "its braces do not close"
    if gold.count("\\left") - gold.count("\\leftarrow") != gold.count("\\right") - gold.count("\\rightarrow"):
        return r"it holds \left without \right"
    if re.search(r"\\frac\s*(?:\{[^{}]*\}|\d)?\s*$", gold):
        return r"it ends in \frac without its two parts"
    if re.search(r"[-+*/^_=<>]$", value.text):
        return "it ends in an operator"
    return None


def _unread(value: Value) -> str | None:
    unread = next((f for f in _formulas(value) if not ALGEBRA.parses(f)), None)
    return None if unread is None else f"math-verify reads nothing in {unread:.80}"


def _formulas(value: Value) -> list[str]:
    """The parts of a value that math-verify is to read."""
    parts = [f for item in value.items for f in _formulas(item)]
    return [value.text, *parts] if value.kind is Kind.MATHS else parts
