"""The rewards `accuracy` and `reasoning_accuracy`: 1 where the answer equals the gold, 0 where it does not,
None where no gold can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from covey.rewards.equal import is_equal
from covey.rewards.golds import (
    column_text,
    extract_answer,
    extract_gold,
    find_answer,
    gold_problem,
    last_boxed,
)

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

    `log_extra("parsed_by", …)` is told how each answer was found: `answer_tag`, `boxed`, `last_expression` or
    `none`. A row whose gold is None or cannot be read scores None.
    """
    found = [find_answer(text) for text in completions]
    if log_extra is not None:
        log_extra("parsed_by", [how for _, how in found])
    golds = solution if solution is not None else answer
    if golds is None:
        return [None] * len(completions)
    return [_score(gold, text) for (text, _), gold in zip(found, golds, strict=True)]


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


def _score(gold: Any, answer: str | None) -> float | None:
    if gold is None:
        return None
    text = column_text(gold)
    if gold_problem(text) is not None:
        return None
    return float(is_equal(extract_gold(text), answer))
