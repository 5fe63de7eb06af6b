"""The trend of the mean reward over a run: rising, falling or neither."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, variance

from covey.doctor.log import Log
from covey.health.history import SAMPLED
from covey.texts.numbers import told

_LEAST_VALUES = 16
# Of many values a level reward is said to rise in 3 of 1,000 runs, and to fall in as many.
_ERRORS = 2.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Mean reward of the first and the last quarter of the rollouts; `way` is 1, 0 or -1: it rises, neither,
    or falls."""

    first: float
    last: float
    way: int

    @property
    def words(self) -> tuple[str, str]:
        """Both means, with enough digits to tell them apart."""
        first, last = told(self.first, self.last)
        return first, last


def reward_trend(log: Log) -> Trend | None:
    """The trend of the reward; None where there are fewer than 16 rollouts.

    If groups are selected by their rewards, the trend is that of everything that was sampled. A rollout
    counts once, however many steps learn from it: the record of each step repeats its reward, and a value
    that is counted four times looks twice as certain as it is.
    """
    is_selected = any(f"{SAMPLED}reward" in r.metrics for r in log.records)
    name = f"{SAMPLED}reward" if is_selected else "reward"
    by_rollout: dict[int, float] = {}
    for record in log.records:
        value = record.metrics[name].value if name in record.metrics else None
        if value is not None and math.isfinite(value):
            by_rollout.setdefault(record.rollout, value)
    values = list(by_rollout.values())
    if len(values) < _LEAST_VALUES:
        return None
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    error = math.sqrt((variance(first) + variance(last)) / quarter)
    difference = fmean(last) - fmean(first)
    least = max(_quantile(2 * quarter - 2) * error, 1e-9 * max(1.0, abs(fmean(values))))
    way = 0 if abs(difference) <= least else 1 if difference > 0 else -1
    return Trend(first=fmean(first), last=fmean(last), way=way)


def _quantile(degrees: int) -> float:
    """The number of standard errors with the same probability for a small sample: the quantile of
    Student's t (Abramowitz and Stegun, 26.7.5), 3.0 of 28 degrees of freedom and 3.7 of 8."""
    z = _ERRORS
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
