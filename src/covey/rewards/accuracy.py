"""The rewards `accuracy` and `reasoning_accuracy`: 1 where the answer equals the gold, 0 where it does not,
None where no gold can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from covey.rewards.algebra import ALGEBRA
from covey.rewards.answers import extract_answer, extract_gold, find_answer, last_boxed
from covey.rewards.equal import is_equal
from covey.rewards.golds import column_text, gold_problem

__all__ = ["accuracy", "extract_answer", "extract_gold", "is_equal", "last_boxed", "reasoning_accuracy"]

_END_OF_THOUGHT = "</think>"


def accuracy(
    *,
    completions: Sequence[str],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """Compare each completion's answer with the gold of its row's `solution` (else `answer`) column.

    `log_extra("parsed_by", …)` is told how each answer was found, by a name of `covey.rewards.answers`. A row
    whose gold is None or cannot be read scores None.
    """
    found = [find_answer(text) for text in completions]
    if log_extra is not None:
        log_extra("parsed_by", [how for _, how in found])
    golds = solution if solution is not None else answer
    if golds is None:
        return [None] * len(completions)
    pairs = [
        (None if gold is None else column_text(gold), text)
        for (text, _), gold in zip(found, golds, strict=True)
    ]
    # Each pair once, and as many at a time as there are processes that compare formulas.
    different = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(ALGEBRA.num_children, "accuracy") as threads:
        scores = dict(zip(different, threads.map(_score, different), strict=True))
    return [scores[pair] for pair in pairs]


def reasoning_accuracy(
    *,
    completions: Sequence[str],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """`accuracy` of what follows the last `</think>`; 0 for a completion that has none, whatever its thoughts
    hold."""
    ends = [text.rpartition(_END_OF_THOUGHT)[2] if _END_OF_THOUGHT in text else "" for text in completions]
    return accuracy(completions=ends, solution=solution, answer=answer, log_extra=log_extra)


def _score(pair: tuple[str | None, str | None]) -> float | None:
    gold, answer = pair
    if gold is None or gold_problem(gold) is not None:
        return None
    return float(is_equal(extract_gold(gold), answer))
