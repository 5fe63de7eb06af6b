"""The `accuracy` reward: 1 where the answer equals the gold, 0 where it does not, None where the gold is
missing."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?")
_LATEX_NUMBER = re.compile(r"\$?\s*-?\s*\\(?:d?frac|sqrt|text|mathrm|boxed|left|\()[^+=]*\$?")
_LONGEST_NUMBER = 100
_LONGEST_FORMULA = 1000


def accuracy(
    *, completions: Sequence[str], solution: Sequence[Any] | None = None, answer: Sequence[Any] | None = None
) -> list[float | None]:
    """Compare each completion's answer with the gold of its row's `solution` (else `answer`) column."""
    golds = solution if solution is not None else answer
    if golds is None:
        return [None] * len(completions)
    return [
        None if gold is None else float(is_equal(extract_gold(str(gold)), extract_answer(text)))
        for text, gold in zip(completions, golds, strict=True)
    ]


def extract_gold(text: str) -> str:
    """The gold of a solution text: in `<answer>`, else after the last `####`, else the last boxed, else all
    of it."""
    tagged = _ANSWER.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = last_boxed(text)
    return (boxed if boxed is not None else text).strip()


def extract_answer(text: str) -> str | None:
    """The answer of a completion: in `<answer>`, else the last boxed, else its last number, else None."""
    tagged = _ANSWER.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            if depth == 0:
                return text[begin:i]
            depth -= 1
    return None


def is_equal(gold: str, answer: str | None) -> bool:
    """Whether an answer means what the gold means: as text, as a number, else as mathematics (math-verify).

    The equal of an integer is a number written as one, in LaTeX if need be: `12+45` is no answer to a
    question whose gold is 57, or a policy would learn to give the question back.
    """
    if answer is None:
        return False
    if _plain(gold) == _plain(answer):
        return True
    gold_number, answer_number = _number(gold), _number(answer)
    if gold_number is not None and answer_number is not None:
        return gold_number == answer_number
    if _INTEGER.fullmatch(gold) and not _LATEX_NUMBER.fullmatch(answer.strip()):
        return False
    return _mathematically_equal(gold, answer)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(".")


def _number(text: str) -> Fraction | None:
    """The value of an integer, decimal or fraction in digits, with thousands separators or dollar signs; else
    None."""
    bare = text.strip().strip("$").strip()
    # The length is limited because the text is a policy's: a number of a million digits takes minutes.
    if len(bare) > _LONGEST_NUMBER or not _NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(bare.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _mathematically_equal(gold: str, answer: str) -> bool:
    # sympy and the LaTeX grammar take a second to import: only for those who need them.
    from math_verify import parse, verify

    # math-verify limits its time with an alarm signal, which only a main thread has.
    if len(answer) > _LONGEST_FORMULA:
        return False
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    parsed_gold = parse(f"${gold}$", parsing_timeout=limit)
    parsed_answer = parse(f"${answer}$", parsing_timeout=limit)
    if not parsed_gold or not parsed_answer:
        return False
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=limit))
