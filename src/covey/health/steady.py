"""Rewards with the same value for every completion since the run began."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from covey.types import Metric

# What float32 leaves of the deviation of equal numbers.
_ROUNDING = 3e-7
_STARTS, _MEAN, _STD = ("rewards/", "sampled/rewards/"), "/mean", "/std"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The value of a reward, and in how many rollouts and completions it was the same."""

    value: float
    num_rollouts: int
    num_completions: int

    def extended(self, value: float, spread: float, count: int) -> Steady | None:
        """The count with one more rollout; None if its value differs."""
        bound = _ROUNDING * abs(self.value)
        if abs(value - self.value) > bound or spread > bound:
            return None
        return Steady(
            value=self.value,
            num_rollouts=self.num_rollouts + 1,
            num_completions=self.num_completions + count,
        )


Rewards = dict[str, Steady | None]
"""By the metric with the mean of a reward; None where the reward has varied."""


def follow(rewards: Rewards, metrics: Mapping[str, Metric]) -> None:
    """Update every reward with the metrics of a rollout."""
    for name, value, count in _means(metrics):
        std = metrics.get(f"{name.removesuffix(_MEAN)}{_STD}")
        # Of a single completion there is no deviation, and some logs have none at all.
        spread = 0.0 if std is None or std.value is None else std.value
        before = rewards.get(name, Steady(value=value, num_rollouts=0, num_completions=0))
        rewards[name] = before and before.extended(value, spread, count)


def _means(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, float, int]]:
    for name, metric in metrics.items():
        value = metric.value
        is_mean = name.startswith(_STARTS) and name.endswith(_MEAN)
        if is_mean and value is not None and math.isfinite(value):
            yield name, value, metric.count


def as_json(rewards: Rewards) -> dict[str, list[float] | None]:
    """What `from_json` reads."""
    return {
        n: None if s is None else [s.value, s.num_rollouts, s.num_completions] for n, s in rewards.items()
    }


def from_json(values: Mapping[str, Sequence[float] | None]) -> Rewards:
    """Return the rewards that `as_json` has written."""
    return {
        n: None if v is None else Steady(value=v[0], num_rollouts=int(v[1]), num_completions=int(v[2]))
        for n, v in values.items()
    }
