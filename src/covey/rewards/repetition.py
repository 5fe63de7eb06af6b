"""Rewards against repetition: the share of n-grams that have been there before (arXiv 2502.03373, C.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.rewards.units import units


def repetition(
    *, completions: Sequence[str], repetition_n_grams: int, repetition_max_penalty: float
) -> list[float | None]:
    """`repeated_share` of a completion's words times `repetition_max_penalty`.

    Words stand between spaces; in scripts without spaces each character counts as one
    (`covey.rewards.units`).
    """
    return [
        repetition_max_penalty * share if (share := repeated_share(units(text), repetition_n_grams)) else 0.0
        for text in completions
    ]


def repetition_of_tokens(
    *, completion_ids: Sequence[Sequence[int]], repetition_n_grams: int, repetition_max_penalty: float
) -> list[float | None]:
    """The same over tokens, whatever the language: each of `completion_ids` is one completion's."""
    return [
        repetition_max_penalty * share if (share := repeated_share(ids, repetition_n_grams)) else 0.0
        for ids in completion_ids
    ]


def repeated_share(items: Sequence[Any], n: int) -> float:
    """1 - different n-grams / n-grams; 0 where there is no n-gram: `repeated_share("aaaa", 3)` is 0.5."""
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
