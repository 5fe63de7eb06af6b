"""Accumulators agree with plain arithmetic over all values of all ranks.

The collectives are stood in for by element-wise sums and maxima of the ranks' vectors; what a real transport
does to float64 is not shown here.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import CoveyError
from covey.telemetry.metrics import Accumulator, Reduction
from covey.types import Metric

SCHEMA = {
    "reward": Reduction.MEAN,
    "length/max": Reduction.MAX,
    "length/min": Reduction.MIN,
    "learning_rate": Reduction.LAST,
    "tokens": Reduction.SUM,
}


def reduce_ranks(ranks: list[Accumulator]) -> list[dict[str, Metric]]:
    """Reduce each rank with the others' vectors, as an all-reduce would."""
    vectors = [rank.to_vector() for rank in ranks]
    sums = [math.fsum(column) for column in zip(*(v[0] for v in vectors), strict=True)]
    maxima = [max(column) for column in zip(*(v[1] for v in vectors), strict=True)]
    calls: list[str] = []

    def all_reduce_sum(vector: list[float]) -> list[float]:
        calls.append("sum")
        return sums

    def all_reduce_max(vector: list[float]) -> list[float]:
        calls.append("max")
        return maxima

    results = [rank.reduce(all_reduce_sum, all_reduce_max).result() for rank in ranks]
    assert sorted(calls) == ["max"] * len(ranks) + ["sum"] * len(ranks)
    assert all(result == results[0] for result in results) or any(
        m.value is not None and math.isnan(m.value) for m in results[0].values()
    )
    return results


def fill(accumulator: Accumulator, values: list[float]) -> Accumulator:
    for value in values:
        accumulator.add_max("length/max", value)
        accumulator.add_min("length/min", value)
        accumulator.add_sum("tokens", value)
    accumulator.add_mean("reward", total=math.fsum(values), count=len(values))
    accumulator.add_last("learning_rate", 1e-6)
    return accumulator


def test_one_process_by_hand() -> None:
    accumulator = Accumulator()
    accumulator.add_mean("reward", total=3.0, count=4)
    accumulator.add_mean("reward", total=2.0, count=1)
    accumulator.add_max("max", -5.0)
    accumulator.add_max("max", -7.0)
    accumulator.add_min("min", 5.0)
    accumulator.add_min("min", 7.0)
    accumulator.add_last("lr", 1.0)
    accumulator.add_last("lr", 0.5)
    accumulator.add_sum("tokens", 10.0)
    accumulator.add_sum("tokens", 1.0)
    assert accumulator.result() == {
        "lr": Metric(value=0.5, count=2),
        "max": Metric(value=-5.0, count=2),
        "min": Metric(value=5.0, count=2),
        "reward": Metric(value=1.0, count=5),
        "tokens": Metric(value=11.0, count=2),
    }
    assert list(accumulator.result()) == sorted(accumulator.result())


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), min_size=1, max_size=4).filter(lambda r: any(r)),
)
def test_ranks_of_unequal_size_agree_with_all_values_together(ranks: list[list[float]]) -> None:
    together = [value for values in ranks for value in values]
    result = reduce_ranks([fill(Accumulator(SCHEMA), values) for values in ranks])[0]
    assert result["reward"].value == pytest.approx(math.fsum(together) / len(together), rel=1e-12, abs=1e-9)
    assert result["tokens"].value == pytest.approx(math.fsum(together), rel=1e-12, abs=1e-9)
    assert result["length/max"] == Metric(value=max(together), count=len(together))
    assert result["length/min"] == Metric(value=min(together), count=len(together))
    assert result["learning_rate"] == Metric(value=1e-6, count=1)
    assert result["reward"].count == len(together)


def test_a_mean_is_no_mean_of_means() -> None:
    first, second = Accumulator(SCHEMA), Accumulator(SCHEMA)
    first.add_mean("reward", total=9.0, count=9)
    second.add_mean("reward", total=0.0, count=1)
    assert reduce_ranks([first, second])[1]["reward"] == Metric(value=0.9, count=10)


def test_nothing_added_is_none_and_an_empty_sum_is_zero() -> None:
    expected = {name: Metric(value=None, count=0) for name in SCHEMA} | {"tokens": Metric(value=0.0, count=0)}
    assert Accumulator(SCHEMA).result() == expected
    assert reduce_ranks([Accumulator(SCHEMA), Accumulator(SCHEMA)])[0] == expected
    only_one = fill(Accumulator(SCHEMA), [2.0, 4.0])
    assert reduce_ranks([Accumulator(SCHEMA), only_one])[0] == only_one.result()


def test_the_order_of_adding_does_not_change_the_vector() -> None:
    names = list(SCHEMA)
    random.Random(0).shuffle(names)
    shuffled = Accumulator({name: SCHEMA[name] for name in names})
    assert fill(shuffled, [1.0, 3.0]).to_vector() == fill(Accumulator(SCHEMA), [1.0, 3.0]).to_vector()


@pytest.mark.parametrize("name", ["length/max", "length/min", "learning_rate", "reward", "tokens"])
def test_a_nan_of_one_rank_stays_visible(name: str) -> None:
    healthy, sick = fill(Accumulator(SCHEMA), [1.0]), fill(Accumulator(SCHEMA), [2.0])
    match SCHEMA[name]:
        case Reduction.MEAN:
            sick.add_mean(name, math.nan, 1)
        case Reduction.SUM:
            sick.add_sum(name, math.nan)
        case Reduction.MAX:
            sick.add_max(name, math.nan)
        case Reduction.MIN:
            sick.add_min(name, math.nan)
        case Reduction.LAST:
            sick.add_last(name, math.nan)
    for ranks in ([healthy, sick], [sick, healthy]):
        result = reduce_ranks(ranks)[0]
        assert [n for n, m in result.items() if m.value is not None and math.isnan(m.value)] == [name]


def test_ranks_that_record_different_names_are_refused() -> None:
    first, second = Accumulator({"kl": Reduction.MEAN}), Accumulator({"loss": Reduction.MEAN})
    with pytest.raises(CoveyError, match="the same metrics"):
        reduce_ranks([first, second])


def test_a_schema_is_closed_and_a_reduction_is_for_life() -> None:
    with pytest.raises(CoveyError, match="'kl' is not in the schema"):
        Accumulator(SCHEMA).add_mean("kl", 1.0, 1)
    with pytest.raises(CoveyError, match="by mean, not by max"):
        Accumulator(SCHEMA).add_max("reward", 1.0)
    reduced = Accumulator(SCHEMA).reduce(lambda v: v, lambda v: v)
    with pytest.raises(CoveyError, match="not in the schema"):
        reduced.add_sum("kl", 1.0)
