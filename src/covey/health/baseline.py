"""How far a reward is from where it was: against the first rollout, and against the best five of the run.

A run can break in its first steps, and a median over those is then a median of what is broken. The first
rollout is sampled before any update. One rollout is a small sample, so a difference counts only where it is
several standard errors wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import TypeVar

from covey.health.history import History, Value
from covey.health.levels import level_size, size_of, spread_name
from covey.health.signs.unearned import unearned_now
from covey.health.thresholds import limit
from covey.texts import tr
from covey.texts.numbers import told

_T = TypeVar("_T")
_REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The mean of the metric `name` `before`, over the rollouts of `when`, and `now`; `errors` is the
    difference in standard errors, and `badness` how many times beyond its limit that is."""

    name: str
    before: float
    when: str
    now: float
    errors: float
    badness: float

    @property
    def words(self) -> str:
        """As in "0.328 at step 1 -> 0"."""
        before, now = told(self.before, self.now, digits=3)
        return tr("{before} {when} -> {now}", before=before, when=self.when, now=now)


def fallen(h: History, name: str) -> Change | None:
    """Return how far the mean reward `name` is below its first value, or below its best five, if that is a
    quarter of it and more than chance."""
    return _once(h, f"fallen {name}", lambda: _largest(h, name, -1.0))


def risen(h: History, name: str) -> Change | None:
    """Return how far the mean reward `name` is above its first value, or above its lowest five, if that is a
    quarter of it and more than chance."""
    return _once(h, f"risen {name}", lambda: _largest(h, name, 1.0))


def fallen_parts(h: History) -> list[tuple[str, Change]]:
    """The names of the rewards that have fallen, the clearest first."""
    found = [(name, change) for name in h.parts() if (change := fallen(h, part_of(h, name))) is not None]
    return sorted(found, key=lambda pair: -pair[1].badness)


def risen_parts(h: History) -> list[tuple[str, Change]]:
    """The names of the rewards that have risen, the clearest first."""
    found = [(name, change) for name in h.parts() if (change := risen(h, part_of(h, name))) is not None]
    return sorted(found, key=lambda pair: -pair[1].badness)


def part_of(h: History, name: str) -> str:
    """The metric with the mean of a reward."""
    return f"{h.sampled('rewards/')}{name}/mean"


def total_of(h: History) -> str:
    """The metric with the mean of the total reward."""
    return h.sampled(_REWARD)


def held_out_fall(h: History) -> tuple[Value, Value] | None:
    """The best evaluation and the newest one, where that is a quarter below it and more than chance."""
    series = h.series.get("eval_reward")
    if series is None or len(series.last) < 2:
        return None
    *earlier, newest = series.last
    best = max(earlier, key=lambda v: v.value)
    error = limit("best_errors") * held_out_error(h, newest)
    bound = max(limit("reward_fall_share") * held_out_size(h, best.value), error)
    return (best, newest) if best.value - newest.value > bound else None


def held_out_error(h: History, value: Value) -> float:
    """The standard error of an evaluation."""
    spread = h.series.get(h.sampled("reward_std"))
    # Of a share the deviation is at most a half; other rewards may have a larger one.
    scale = max(0.5, median(v.value for v in spread.first) if spread is not None else 0.0)
    return scale / math.sqrt(max(value.count, 1))


def held_out_size(h: History, value: float) -> float:
    """How large a held-out reward is, for comparisons with a share of it."""
    evaluations = [v.value for v in h.series["eval_reward"].last]
    return level_size(h, total_of(h), value, evaluations)


def is_better(h: History) -> bool:
    """Whether the run improves: the reward has risen, and neither a part of it nor the held-out reward has
    fallen. A total that rises alone says little: one part may be paid for another."""

    def found() -> bool:
        if not h.has_risen() or fallen(h, total_of(h)) is not None:
            return False
        return not fallen_parts(h) and held_out_fall(h) is None

    return _once(h, "is better", found)


def is_solved(h: History) -> bool:
    """Whether rewards that once differed are now the same for every prompt, and the highest of the run: then
    groups without spread are what was wanted. Not where no right answer is earned."""

    def found() -> bool:
        total = h.series.get(total_of(h))
        if total is None or fallen_parts(h) or held_out_fall(h) is not None or unearned_now(h):
            return False
        highest = max(v.value for v in (*total.first, *total.last))
        if total.now < highest - limit("solved_gap") * level_size(h, total_of(h), highest):
            return False
        start = h.sampled("rewards/")
        spreads = [h.series[n] for name in h.parts() if (n := f"{start}{name}/std") in h.series]
        varied = [s for s in spreads if max(v.value for v in s.first) > 0]
        share = limit("solved_spread")
        return bool(varied) and all(s.last[-1].value <= share * max(v.value for v in s.first) for s in varied)

    return _once(h, "is solved", found)


def _once(h: History, key: str, find: Callable[[], _T]) -> _T:
    """What `find` gives, computed once a record: several rules ask."""
    if key not in h.memo:
        h.memo[key] = find()
    return h.memo[key]  # type: ignore[no-any-return]


def _largest(h: History, name: str, sign: float) -> Change | None:
    """The clearest change in the direction of `sign` among both baselines; None where neither is one."""
    series = h.series.get(name)
    if series is None or not series.first:
        return None
    last_first = series.first[-1].step
    values = [*series.first, *(v for v in series.last if v.step > last_first)]
    groups = _groups(h)
    sizes = [int(limit(n)) for n in (("now_few", "now_values") if groups > 1 else ("now_values_log",))]
    num_best = int(limit("best_values"))
    spreads = _spreads(h, name)
    levels = [v.value for v in values]
    change = partial(_change, name, spreads=spreads, groups=groups, sign=sign, levels=levels)
    found = []
    for size in sizes:
        earlier, now = values[:-size], values[max(1, len(values) - size) :]
        if len(now) >= limit("now_least"):
            found.append(change(values[:1], now, least=limit("first_errors")))
        if len(earlier) >= num_best and size == sizes[-1]:
            starts = range(len(earlier) - num_best + 1)
            best = max(starts, key=lambda i: -sign * fmean(levels[i : i + num_best]))
            found.append(change(earlier[best : best + num_best], now, least=limit("best_errors")))
    return max((c for c in found if c is not None), key=lambda c: c.badness, default=None)


def _change(
    name: str,
    base: Sequence[Value],
    now: Sequence[Value],
    *,
    spreads: Mapping[int, float],
    levels: Sequence[float],
    groups: int,
    sign: float,
    least: float,
) -> Change | None:
    """Return the change of the mean from `base` to `now`; None if it may be chance.

    The standard error of the change is that of the difference of two samples of one distribution, estimated
    from how much rollouts differ. A single rollout does not show that. It counts as one sample for each of
    its groups, since the completions of a group may be almost the same.
    """
    before, after = (fmean(v.value for v in values) for values in (base, now))
    difference = after - before
    share = limit("reward_fall_share") * size_of(before, spreads.values(), levels)
    # What is left of a sum of numbers of this size is no difference.
    if sign * difference <= max(share, 1e-9 * max(1.0, abs(before))):
        return None
    size, rest = len(base), len(now)
    known = [spreads[v.step] ** 2 for v in (*base, *now) if v.step in spreads]
    own = fmean(known) if known and size == 1 and groups > 1 else 0.0
    spread = max(own, groups * _noise(base, now))
    spread += difference**2 * size * rest / (size + rest) ** 2
    error = math.sqrt(spread * (1 / size + 1 / rest) / groups)
    errors = sign * difference / max(error, 1e-12)
    if errors < least:
        return None
    first, last = base[0].step, base[-1].step
    when = (
        tr("at step {first}", first=first)
        if first == last
        else tr("in steps {first} to {last}", first=first, last=last)
    )
    return Change(name=name, before=before, when=when, now=after, errors=errors, badness=errors / least)


def _noise(*windows: Sequence[Value]) -> float:
    """The variance of values from one rollout to the next, so that a trend is not taken for noise."""
    return fmean([(b.value - a.value) ** 2 / 2 for values in windows for a, b in pairwise(values)] or [0.0])


def _groups(h: History) -> int:
    """Groups of a rollout; 1 where a log does not say how many things a value saw."""
    spread, total = (h.series.get(h.sampled(name)) for name in ("reward_std", _REWARD))
    if spread is None or total is None:
        return 1
    groups = spread.last[-1].count
    return groups if 1 < groups < total.last[-1].count else 1


def _spreads(h: History, name: str) -> dict[int, float]:
    """The deviation of a reward by step."""
    series = h.series.get(spread_name(h, name))
    return {} if series is None else {v.step: v.value for v in (*series.first, *series.last)}
