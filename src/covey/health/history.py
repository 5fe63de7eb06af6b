"""What the rules know of a run: the values of each metric in order, and what they were at the start."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from covey.config.dialect import LEARNING_RATE
from covey.health.saved import Checkpoints, none_saved
from covey.health.steady import Rewards, as_json, follow, from_json
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Fix, Metric, StepRecord

_KEPT = 200
# A rate this many times the usual one is a slip, of which a third is one too.
_FAR = 300
_OF_PROCESS = ("memory", "time/", "throughput/")
SAMPLED = "sampled/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A finite value of a metric, the step that it was recorded at, and how many things it saw."""

    step: int
    value: float
    count: int


class Window:
    """The newest 200 values of a metric, oldest first.

    Its room is taken at once, so that a run does not grow while its windows fill.
    """

    __slots__ = ("_packed", "_taken")

    def __init__(self, values: Iterable[Value] = ()) -> None:
        self._packed = array("d", bytes(8 * 3 * _KEPT))
        self._taken = 0
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return min(self._taken, _KEPT)

    def __getitem__(self, index: int) -> Value:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(index)
        return self._taken_as(self._taken - size + index % size)

    def __iter__(self) -> Iterator[Value]:
        return map(self._taken_as, range(self._taken - len(self), self._taken))

    def _taken_as(self, number: int) -> Value:
        at = 3 * (number % _KEPT)
        step, value, count = self._packed[at : at + 3]
        return Value(step=int(step), value=value, count=int(count))

    def append(self, value: Value) -> None:
        """Take a value in, in the place of the oldest one where there are 200."""
        at = 3 * (self._taken % _KEPT)
        self._packed[at : at + 3] = array("d", (value.step, value.value, value.count))
        self._taken += 1

    def numbers(self, newest: int = _KEPT) -> Sequence[float]:
        """The values alone, at most so many."""
        size, end = len(self), self._taken % _KEPT
        ordered = self._packed[1 : 3 * size : 3]
        if self._taken > _KEPT:
            ordered = ordered[end:] + ordered[:end]
        return ordered[max(size - newest, 0) :]


@dataclass(slots=True, kw_only=True)
class Series:
    """The values of one metric: those of the first steps, and the newest ones."""

    first: list[Value] = field(default_factory=list)
    last: Window = field(default_factory=Window)
    is_calibrated: bool = False

    def add(self, value: Value) -> None:
        """Take a value in; the start ends after 20 steps and at least five values."""
        self.last.append(value)
        if self.is_calibrated:
            return
        if self.first and value.step - self.first[0].step >= limit("calibration_steps"):
            self.is_calibrated = len(self.first) >= limit("calibration_values")
        if not self.is_calibrated:
            self.first.append(value)

    @property
    def begin(self) -> float:
        """The first value, which is of the model before any update."""
        return self.first[0].value

    @property
    def start(self) -> float | None:
        """The median of the first steps, once they are over."""
        return median(v.value for v in self.first) if self.is_calibrated else None

    @property
    def now(self) -> float:
        """The mean of the newest five values."""
        return fmean(self.last.numbers(int(limit("recent_values"))))


@dataclass(slots=True, kw_only=True)
class History:
    """All series of a run. `options` are those of the run as far as they are known.

    A metric of a rollout stands in the record of each of its optimizer steps; it is taken in once. `steady`
    follows which rewards never varied, and `memo` is what rules have computed at this record. `saved` lists
    the checkpoints that are there now. Without `has_counts` a log does not say how many things a value saw.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    record: StepRecord | None = None
    is_new_rollout: bool = True
    num_records: int = 0
    highest_rate: float = 0.0
    memo: dict[str, Any] = field(default_factory=dict)
    steady: Rewards = field(default_factory=dict)
    saved: Checkpoints = none_saved
    has_counts: bool = True

    def add(self, record: StepRecord) -> None:
        """Take a record in."""
        before = self.record
        self.is_new_rollout = before is None or record.rollout != before.rollout
        self.record = record
        self.memo.clear()
        self.num_records += 1
        for name, metric in record.metrics.items():
            value = metric.value
            if value is None or not math.isfinite(value) or not (self.is_new_rollout or is_of_step(name)):
                continue
            found = Value(step=record.step, value=value, count=metric.count)
            self.series.setdefault(name, Series()).add(found)
        if self.is_new_rollout:
            follow(self.steady, record.metrics)
        self.highest_rate = max(self.highest_rate, self.value("learning_rate") or 0.0)

    @property
    def step(self) -> int:
        """The step of the newest record."""
        return 0 if self.record is None else self.record.step

    def value(self, *names: str) -> float | None:
        """The newest record's value of the first of these metrics that it has."""
        metrics = {} if self.record is None else self.record.metrics
        return next((metrics[n].value for n in names if n in metrics and metrics[n].value is not None), None)

    def get(self, *names: str) -> Series | None:
        """The series of the first of these metrics that the newest record has a value for."""
        return next((self.series[n] for n in names if self.value(n) is not None and n in self.series), None)

    def parts(self) -> dict[str, Series]:
        """The series of the mean of each reward, by the name of the reward."""
        start = self.sampled("rewards/")
        names = [n for n in self.series if n.startswith(start) and n.endswith("/mean")]
        return {n.removeprefix(start).removesuffix("/mean"): self.series[n] for n in names}

    def sampled(self, name: str) -> str:
        """The name of a metric over everything that was sampled, where that is not what is learnt from.

        Groups that were chosen by their rewards do not say how good the policy is.
        """
        return f"{SAMPLED}{name}" if self.value(f"{SAMPLED}reward") is not None else name

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON.

        Memory and speed are of the process that measured them, and begin anew with another one.
        """
        return {
            "rollout": None if self.record is None else self.record.rollout,
            "num_records": self.num_records,
            "highest_rate": self.highest_rate,
            "steady": as_json(self.steady),
            "series": [
                [name, series.is_calibrated, _triples(series.first), _triples(series.last)]
                for name, series in self.series.items()
                if not name.startswith(_OF_PROCESS)
            ],
        }

    def load_state(self, values: Mapping[str, Any], step: int) -> None:
        """Go on from what `state` gave at this step."""
        if values["rollout"] is not None:
            self.record = StepRecord(step=step, rollout=values["rollout"], pass_index=0, metrics={})
        self.num_records, self.highest_rate = values["num_records"], values["highest_rate"]
        self.series = {
            name: Series(first=_values(first), last=Window(_values(last)), is_calibrated=is_calibrated)
            for name, is_calibrated, first, last in values["series"]
        }
        self.steady = from_json(values["steady"]) if "steady" in values else self._steady_of_series()

    def _steady_of_series(self) -> Rewards:
        """Derive `steady` from the recorded series; a state saved by an older version holds no `steady`."""
        found: Rewards = {}
        steps: dict[int, dict[str, Metric]] = {}
        for name, series in self.series.items():
            for v in (*series.first, *series.last):
                steps.setdefault(v.step, {})[name] = Metric(value=v.value, count=v.count)
        for step in sorted(steps):
            follow(found, steps[step])
        return found

    def has_risen(self) -> bool:
        """Whether the reward is above that of the start by a quarter of the spread within groups."""
        reward = self.get(self.sampled("reward"))
        if reward is None:
            return False
        start = reward.begin if reward.start is None else reward.start
        spread = self.series.get(self.sampled("reward_std"))
        scale = median(v.value for v in spread.first) if spread is not None and spread.first else 0.0
        return reward.now > start + max(limit("risen_spreads") * scale, 1e-9)

    def option(self, name: str) -> float | None:
        """A numeric option, where it is known."""
        return number(self.options.get(name))

    def changing(self, fixes: Sequence[Fix]) -> tuple[Fix, ...]:
        """The fixes without those that ask for what the run has already."""
        return tuple(
            fix
            for fix in fixes
            if not fix.edits or any(self.options.get(name) != value for name, value in fix.edits.items())
        )

    @property
    def compares_siblings(self) -> bool:
        """Whether advantages come from the spread within groups alone."""
        return self.options.get("advantage_estimator") != "reinforce_plus_plus"

    def slower(self, *, by: Literal[3, 10] = 3) -> Fix:
        """A third or a tenth of the learning rate, or a usual one where it is far above that."""
        rate = self.option("learning_rate")
        usual = LEARNING_RATE.get(str(self.options.get("tuner_type")), LEARNING_RATE["full"])
        if rate and rate > _FAR * usual:
            return Fix(text=tr("use a usual learning rate"), edits={"learning_rate": usual})
        text = tr("use a third of the learning rate") if by == 3 else tr("use a tenth of the learning rate")
        return Fix(text=text, edits={"learning_rate": float(f"{rate / by:.1g}")}) if rate else Fix(text=text)

    def larger_groups(self) -> Fix:
        """Twice the completions a prompt, as an edit where the batch is known to divide by it."""
        size, batch = self.option("num_generations"), self.option("generation_batch_size")
        text = tr("use larger groups: with twice the completions per prompt, more groups contain a right one")
        if size and batch and batch % (2 * size) == 0:
            return Fix(text=text, edits={"num_generations": int(2 * size)})
        return Fix(text=text)


def _triples(values: Iterable[Value]) -> list[list[int | float]]:
    return [[v.step, v.value, v.count] for v in values]


def _values(triples: Sequence[Sequence[Any]]) -> list[Value]:
    return [Value(step=step, value=value, count=count) for step, value, count in triples]


def is_of_step(name: str) -> bool:
    """Whether a metric is of one optimizer step, and not of the rollout that the step learns from."""
    own = ("loss", "kl", "entropy", "grad_norm", "learning_rate", "update_ratio", "frac_params_changed")
    return name in own or name.startswith(("entropy/", "memory", "clip_ratio", "rows/dropped", "eval_"))


def number(value: Any) -> float | None:
    """The finite number that a value is or spells; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def chance_of_no_spread(share: float, size: float) -> float:
    """p^G + (1-p)^G: how often G rewards of 0 or 1 are equal; `chance_of_no_spread(0.5, 8)` is 0.0078."""
    return float(share**size + (1 - share) ** size)


def binary_means(history: History) -> Sequence[float]:
    """The newest mean of each reward whose spread is that of values 0 and 1."""
    found = []
    start = history.sampled("rewards/")
    for name, series in history.parts().items():
        mean, spread = history.value(f"{start}{name}/mean"), history.value(f"{start}{name}/std")
        if mean is None or spread is None or not 0 <= mean <= 1:
            continue
        if abs(spread - math.sqrt(mean * (1 - mean))) <= 0.05:
            found.append(series.now)
    return found
