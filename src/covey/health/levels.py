"""The size of a mean reward, against which a rise or fall is measured; it ignores a common offset.

Rewards of 1000 and 1001 carry the same information as 0 and 1, but a fall by a quarter of 1000 could never
happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from covey.health.history import History
from covey.health.thresholds import limit


def size_of(value: float, spreads: Iterable[float], values: Iterable[float]) -> float:
    """The size of a mean reward: its distance from 0, but no more than twice the largest standard deviation
    of completions or, if that is larger, the range of the means themselves."""
    seen = [value, *values]
    span = max(limit("level_spreads") * max(spreads, default=0.0), max(seen) - min(seen))
    return min(abs(value), span) if span > 0 else abs(value)


def spread_name(h: History, name: str) -> str:
    """The metric with the standard deviation of a mean reward: over all completions; for the total reward
    within groups, as only that is recorded."""
    return h.sampled("reward_std") if name == h.sampled("reward") else f"{name.removesuffix('mean')}std"


def level_size(h: History, name: str, value: float, beside: Sequence[float] = ()) -> float:
    """`size_of` a value of the mean reward `name`, compared with the values `beside` it or, without these,
    with those on record."""
    found = []
    for wanted in (spread_name(h, name), name):
        series = h.series.get(wanted)
        found.append([] if series is None else [*(v.value for v in series.first), *series.last.numbers()])
    spreads, values = found
    return size_of(value, spreads, beside or values)
