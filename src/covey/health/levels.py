"""How large a level of a reward is, also where rewards have an offset.

A reward of 1000 or 1001 is a reward of 0 or 1. A quarter of 1000 would be more than it can ever change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from covey.health.history import History
from covey.health.thresholds import limit


def size_of(value: float, spreads: Iterable[float], values: Iterable[float]) -> float:
    """How large a level is, for comparisons with a share of it: its distance from 0, and no more than twice
    the largest deviation of completions, or the range of the levels themselves, where that is larger."""
    seen = [value, *values]
    span = max(limit("level_spreads") * max(spreads, default=0.0), max(seen) - min(seen))
    return min(abs(value), span) if span > 0 else abs(value)


def spread_name(h: History, name: str) -> str:
    """The metric with the deviation of a mean reward: over all completions; of the total that within groups,
    which is what is known of it."""
    return h.sampled("reward_std") if name == h.sampled("reward") else f"{name.removesuffix('mean')}std"


def level_size(h: History, name: str, value: float, beside: Sequence[float] = ()) -> float:
    """`size_of` a value of the mean reward `name`, or of one that stands `beside` others."""
    found = []
    for wanted in (spread_name(h, name), name):
        series = h.series.get(wanted)
        found.append([] if series is None else [*(v.value for v in series.first), *series.last.numbers()])
    spreads, values = found
    return size_of(value, spreads, beside or values)
