"""Rewards that look at the number of tokens of a completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from covey.rewards.accuracy import accuracy
from covey.rewards.gold_texts import GoldLists


def soft_overlong(
    *, completion_ids: Sequence[Sequence[int]], soft_max_length: int, soft_cache_length: int
) -> list[float | None]:
    """0 up to `soft_max_length - soft_cache_length` tokens, falling by a straight line to -1 at
    `soft_max_length`, and -1 beyond (DAPO, arXiv 2503.14476, equation 13)."""
    start = soft_max_length - soft_cache_length
    return [_overlong(len(ids) - start, soft_cache_length) for ids in completion_ids]


def _overlong(over: int, zone: int) -> float:
    if over <= 0:
        return 0.0
    return -over / zone if over < zone else -1.0


def cosine(
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    cosine_min_len_value_wrong: float,
    cosine_max_len_value_wrong: float,
    cosine_min_len_value_correct: float,
    cosine_max_len_value_correct: float,
    cosine_max_len: int,
    gold_lists: GoldLists | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """`accuracy`, weighed by length: along half a cosine from the value for no token to that for
    `cosine_max_len` tokens, one pair for right and one for wrong answers (arXiv 2502.03373, C.1).

    A longer completion scores as one of `cosine_max_len` tokens; a row that `accuracy` says nothing of scores
    None.
    """
    right = accuracy(
        completions=completions, solution=solution, answer=answer, gold_lists=gold_lists, log_extra=log_extra
    )
    ends = {
        0.0: (cosine_min_len_value_wrong, cosine_max_len_value_wrong),
        1.0: (cosine_min_len_value_correct, cosine_max_len_value_correct),
    }
    return [
        None if value is None else _between(*ends[value], len(ids) / cosine_max_len)
        for value, ids in zip(right, completion_ids, strict=True)
    ]


def _between(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
