"""Metrics that know how they reduce: over the micro-batches of a step, then once over the ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from covey.errors import CoveyError
from covey.types import Metric

AllReduce = Callable[[list[float]], list[float]]


class Reduction(StrEnum):
    """How the values of a metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """What has been added: a total or an extreme, how many values it stands for, and how many were NaN."""

    reduction: Reduction
    value: float
    count: int = 0
    num_nan: int = 0


_EMPTY = {
    Reduction.MEAN: 0.0,
    Reduction.SUM: 0.0,
    Reduction.MAX: -math.inf,
    Reduction.MIN: math.inf,
    Reduction.LAST: -math.inf,
}


class Accumulator:
    """Collects a step's values and reduces them over ranks with two calls.

    With a `schema` the names are fixed: every rank builds the same vectors whatever it saw, and an unknown
    name is a CoveyError. Without one, names come as they are added, which suits a single process. All sums
    are float64.

        accumulator = Accumulator({"reward": Reduction.MEAN})
        accumulator.add_mean("reward", total=12.5, count=64)
        accumulator.result()["reward"]          # Metric(value=0.1953125, count=64)
    """

    def __init__(self, schema: Mapping[str, Reduction] | None = None) -> None:
        self._fixed = schema is not None
        self._cells = {
            name: _Cell(reduction=reduction, value=_EMPTY[reduction])
            for name, reduction in (schema or {}).items()
        }

    @property
    def schema(self) -> dict[str, Reduction]:
        """The names with their reductions, sorted."""
        return {name: self._cells[name].reduction for name in sorted(self._cells)}

    def add_mean(self, name: str, total: float, count: int) -> None:
        """Add the sum of `count` values; the metric is the mean over all of them, None if there is none."""
        cell = self._cell(name, Reduction.MEAN)
        self._store(name, cell, cell.value + total, count)

    def add_sum(self, name: str, value: float) -> None:
        """Add a value to a sum, which is 0 where nothing was added."""
        cell = self._cell(name, Reduction.SUM)
        self._store(name, cell, cell.value + value, 1)

    def add_max(self, name: str, value: float) -> None:
        """Keep the largest value; a NaN among them stays visible."""
        self._add_extreme(name, Reduction.MAX, value, max)

    def add_min(self, name: str, value: float) -> None:
        """Keep the smallest value; a NaN among them stays visible."""
        self._add_extreme(name, Reduction.MIN, value, min)

    def add_last(self, name: str, value: float) -> None:
        """Keep the latest value, which every rank is to know alike; where they differ, the largest counts."""
        cell = self._cell(name, Reduction.LAST)
        is_nan = math.isnan(value)
        self._cells[name] = _Cell(
            reduction=Reduction.LAST,
            value=-math.inf if is_nan else value,
            count=cell.count + 1,
            num_nan=int(is_nan),
        )

    def result(self) -> dict[str, Metric]:
        """Return every metric by name, sorted; value None where no value was added (0 for a sum)."""
        return {name: _metric(self._cells[name]) for name in sorted(self._cells)}

    def to_vector(self) -> tuple[list[float], list[float]]:
        """Return the numbers to be summed over ranks and those whose maximum counts.

        The maxima start with a fingerprint of the schema and its negative: only equal ones cancel after the
        reduction. NaN is sent as a count, because what a maximum makes of it depends on the transport.
        """
        sums: list[float] = []
        mark = _fingerprint(self.schema)
        maxima: list[float] = [mark, -mark]
        for name in sorted(self._cells):
            cell = self._cells[name]
            match cell.reduction:
                case Reduction.MEAN | Reduction.SUM:
                    sums += [cell.value, float(cell.count)]
                case Reduction.MAX | Reduction.MIN:
                    sums += [float(cell.count), float(cell.num_nan)]
                    maxima.append(cell.value if cell.reduction is Reduction.MAX else -cell.value)
                case Reduction.LAST:
                    sums.append(float(cell.num_nan))
                    maxima += [cell.value, float(cell.count)]
        return sums, maxima

    def from_vector(self, sums: list[float], maxima: list[float]) -> Accumulator:
        """Return an accumulator of this schema with the reduced numbers; unequal schemas raise CoveyError."""
        if len(maxima) < 2 or maxima[0] != -maxima[1]:
            raise CoveyError(f"the ranks do not record the same metrics; here they are {list(self.schema)}")
        reduced = Accumulator(self.schema)
        reduced._fixed = self._fixed
        add, top = iter(sums), iter(maxima[2:])
        for name, reduction in self.schema.items():
            match reduction:
                case Reduction.MEAN | Reduction.SUM:
                    cell = _Cell(reduction=reduction, value=next(add), count=round(next(add)))
                case Reduction.MAX | Reduction.MIN:
                    sign = 1.0 if reduction is Reduction.MAX else -1.0
                    count, num_nan = round(next(add)), round(next(add))
                    cell = _Cell(reduction=reduction, value=sign * next(top), count=count, num_nan=num_nan)
                case Reduction.LAST:
                    num_nan, value, count = round(next(add)), next(top), round(next(top))
                    cell = _Cell(reduction=reduction, value=value, count=count, num_nan=num_nan)
            reduced._cells[name] = cell
        return reduced

    def reduce(self, all_reduce_sum: AllReduce, all_reduce_max: AllReduce) -> Accumulator:
        """Return this accumulator over all ranks; both callables work element by element, in float64."""
        sums, maxima = self.to_vector()
        # The maxima go first: their fingerprint tells unequal ranks apart before any sum is believed.
        reduced_maxima = all_reduce_max(maxima)
        return self.from_vector(all_reduce_sum(sums), reduced_maxima)

    def _cell(self, name: str, reduction: Reduction) -> _Cell:
        if name not in self._cells:
            if self._fixed:
                raise CoveyError(f"the metric {name!r} is not in the schema that all ranks share")
            return _Cell(reduction=reduction, value=_EMPTY[reduction])
        cell = self._cells[name]
        if cell.reduction is not reduction:
            raise CoveyError(f"the metric {name!r} reduces by {cell.reduction}, not by {reduction}")
        return cell

    def _store(self, name: str, cell: _Cell, value: float, count: int) -> None:
        self._cells[name] = _Cell(reduction=cell.reduction, value=value, count=cell.count + count)

    def _add_extreme(
        self, name: str, reduction: Reduction, value: float, choose: Callable[[float, float], float]
    ) -> None:
        cell = self._cell(name, reduction)
        is_nan = math.isnan(value)
        self._cells[name] = _Cell(
            reduction=reduction,
            value=cell.value if is_nan else choose(cell.value, value),
            count=cell.count + 1,
            num_nan=cell.num_nan + is_nan,
        )


def _metric(cell: _Cell) -> Metric:
    if cell.reduction is Reduction.SUM:
        return Metric(value=cell.value, count=cell.count)
    if cell.count == 0:
        return Metric(value=None, count=0)
    if cell.reduction is Reduction.MEAN:
        return Metric(value=cell.value / cell.count, count=cell.count)
    return Metric(value=math.nan if cell.num_nan else cell.value, count=cell.count)


def _fingerprint(schema: Mapping[str, Reduction]) -> float:
    text = "\n".join(f"{name}\t{reduction}" for name, reduction in schema.items())
    return float(zlib.crc32(text.encode()))
