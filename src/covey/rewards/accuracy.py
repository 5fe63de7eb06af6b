"""The rewards `accuracy` and `reasoning_accuracy`: 1 where the answer equals the gold, 0 where it does not,
None where no gold can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from covey.rewards.algebra import ALGEBRA
from covey.rewards.answers import (
    extract_answer,
    extract_gold,
    find_answer,
    last_boxed,
    without_thoughts,
)
from covey.rewards.equal import is_equal
from covey.rewards.gold_texts import GoldLists, UnreadableGold, gold_texts
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
    gold_lists: GoldLists | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """Compare each completion's answer with the gold of its row's `solution` (else `answer`) column.

    Of a gold that is a list any member is right, with `gold_lists` "all" an answer that gives all of them.
    `log_extra("parsed_by", …)` receives how each answer was found, by a name of `covey.rewards.answers`. A
    row whose gold is None or cannot be read scores None.
    """
    golds = [_texts(gold, gold_lists) for gold in golds_of(len(completions), solution, answer)]
    pairs = list(zip(completions, golds, strict=True))
    # Each pair once, and as many at a time as there are processes that compare formulas.
    different = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(ALGEBRA.num_children, "accuracy") as threads:
        found = dict(zip(different, threads.map(_score, different), strict=True))
    if log_extra is not None:
        log_extra("parsed_by", [found[pair][1] for pair in pairs])
    return [found[pair][0] for pair in pairs]


def reasoning_accuracy(
    *,
    completions: Sequence[str],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    gold_lists: GoldLists | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """`accuracy` of what follows the last `</think>`; 0 for a completion that has none, whatever its thoughts
    hold."""
    ends = [text.rpartition(_END_OF_THOUGHT)[2] if _END_OF_THOUGHT in text else "" for text in completions]
    return accuracy(
        completions=ends, solution=solution, answer=answer, gold_lists=gold_lists, log_extra=log_extra
    )


def golds_of(count: int, solution: Sequence[Any] | None, answer: Sequence[Any] | None) -> list[Any]:
    """The gold of each of `count` rows: its `solution`, or where that is None its `answer`."""
    first, second = (column if column is not None else [None] * count for column in (solution, answer))
    return [own if own is not None else other for own, other in zip(first, second, strict=True)]


def _texts(gold: Any, gold_lists: GoldLists | None) -> tuple[str, ...]:
    if gold is None:
        return ()
    try:
        return gold_texts(gold, gold_lists)
    except UnreadableGold:
        return ()


def _score(pair: tuple[str, tuple[str, ...]]) -> tuple[float | None, str]:
    """The score of a completion whose gold has these alternatives, and how its answer was found."""
    completion, golds = pair
    found = find_answer(completion)
    readable = [gold for gold in golds if gold_problem(gold) is None]
    hows = []
    for gold in readable:
        answer, how = _parsed(completion, found, extract_gold(gold))
        if is_equal(extract_gold(gold), answer):
            return 1.0, how
        hows.append(how)
    return (0.0, hows[0]) if hows else (None, found[1])


def _parsed(completion: str, found: tuple[str | None, str], gold: str) -> tuple[str | None, str]:
    """The answer and how it was found: a gold in words is compared with words, another with no sentence."""
    answer, how = found
    is_words = read(gold).kind is Kind.WORDS and any(c.isalpha() for c in gold)
    if how in _MARKED:
        return answer if answer is None or is_words else of_sentence(answer), how
    words = last_words(without_thoughts(completion), gold) if is_words else None
    return (words, "last_words") if words else (answer, how)
