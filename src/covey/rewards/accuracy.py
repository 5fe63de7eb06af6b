"""The rewards `accuracy` and `reasoning_accuracy`: 1 where the answer equals the gold, 0 where it does not,
None where no gold can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from covey.rewards.algebra import ALGEBRA
from covey.rewards.answers import (
    column_text,
    extract_answer,
    extract_gold,
    find_answer,
    last_boxed,
    without_thoughts,
)
from covey.rewards.equal import is_equal
from covey.rewards.golds import gold_problem
from covey.rewards.prose import last_words, of_sentence
from covey.rewards.values import Kind, read

__all__ = ["accuracy", "extract_answer", "extract_gold", "is_equal", "last_boxed", "reasoning_accuracy"]

_END_OF_THOUGHT = "</think>"
_MARKED = ("answer_tag", "boxed", "hashes")


def accuracy(
    *,
    completions: Sequence[str],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """Compare each completion's answer with the gold of its row's `solution` (else `answer`) column.

    `log_extra("parsed_by", …)` receives how each answer was found, by a name of `covey.rewards.answers`. A
    row whose gold is None or cannot be read scores None.
    """
    golds = solution if solution is not None else answer
    texts = [None if gold is None else column_text(gold) for gold in golds or [None] * len(completions)]
    parsed = [_parsed(text, gold) for text, gold in zip(completions, texts, strict=True)]
    if log_extra is not None:
        log_extra("parsed_by", [how for _, how in parsed])
    pairs = [(gold, answer) for gold, (answer, _) in zip(texts, parsed, strict=True)]
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


def _parsed(completion: str, gold: str | None) -> tuple[str | None, str]:
    """The answer and how it was found: a gold in words is compared with words, another with no sentence."""
    answer, how = find_answer(completion)
    if gold is None:
        return answer, how
    gold_answer = extract_gold(gold)
    is_words = read(gold_answer).kind is Kind.WORDS and any(c.isalpha() for c in gold_answer)
    if how in _MARKED:
        return answer if answer is None or is_words else of_sentence(answer), how
    words = last_words(without_thoughts(completion), gold_answer) if is_words else None
    return (words, "last_words") if words else (answer, how)


def _score(pair: tuple[str | None, str | None]) -> float | None:
    gold, answer = pair
    if gold is None or gold_problem(gold) is not None:
        return None
    return float(is_equal(extract_gold(gold), answer))
