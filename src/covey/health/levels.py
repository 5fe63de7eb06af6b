"""Levels of a reward: how large one is where rewards have an offset, and with how many digits it is told.

A reward of 1000 or 1001 is a reward of 0 or 1. A quarter of 1000 would be more than it can ever change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from covey.health.history import History
from covey.health.thresholds import limit

_LEAST_DIGITS, _MOST_DIGITS = 3, 12


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


def told(*values: float, digits: int = 4) -> tuple[str, ...]:
    """Numbers with as many digits as tell them apart: `told(1000.2, 1001.4)` is ("1000.2", "1001.4")."""
    known = [v for v in values if math.isfinite(v)]
    span = max(known, default=0.0) - min(known, default=0.0)
    if span > 0:
        needed = math.ceil(math.log10(max(abs(v) for v in known) / span)) + _LEAST_DIGITS
        digits = min(max(digits, needed), _MOST_DIGITS)
    return tuple(f"{v:.{digits}g}" for v in values)
