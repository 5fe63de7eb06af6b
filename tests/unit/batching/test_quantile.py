"""A quantile over ranks is the value that one process would find, to the bit."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.batching.quantile import exact_quantile
from covey.comm import LocalComm
from support.rollout_shares import on_counting_ranks


def kth(values: list[float], share: float) -> float:
    """What `kthvalue` of all values gives."""
    flat = torch.tensor(values)
    num = max(1, math.ceil(share * len(values)))
    return float(flat.kthvalue(len(values) - num + 1).values)


def bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<f", value)


floats = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, 1.5, -1.5, 1e-45, -1e-45, math.inf])


@settings(max_examples=300, deadline=None)
@given(st.lists(floats, min_size=1, max_size=60), st.floats(0.0, 0.999))
def test_the_value_of_one_process(values: list[float], share: float) -> None:
    found = exact_quantile(torch.tensor(values), share, LocalComm())
    # Zeros have two signs and are equal; `kthvalue` gives either.
    assert found is not None and bits(found) == bits(kth(values, share) + 0.0)


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.97])
@pytest.mark.parametrize("num_values", [1, 7, 1000])
def test_ranks_with_ties_and_ranks_without_values(share: float, num_values: int) -> None:
    torch.manual_seed(num_values)
    values = torch.randn(num_values).mul(4).round().div(4)
    parts = [values[:0], values[: num_values // 5], values[num_values // 5 :], values[:0], values[:0]]
    found, shared = on_counting_ranks(5, lambda comm: exact_quantile(parts[comm.rank], share, comm))
    assert {bits(value) for value in found} == {bits(kth(values.tolist(), share) + 0.0)}
    # Three sums of counts, whatever the number of values.
    assert int(shared.sent["sum_tensor"].max()) == 8 * (2048 + 2048 + 1024)


def test_nothing_to_leave_out() -> None:
    assert exact_quantile(torch.ones(3), 1.0, LocalComm()) is None
    assert exact_quantile(torch.zeros(0), 0.5, LocalComm()) is None
    assert on_counting_ranks(2, lambda comm: exact_quantile(torch.zeros(0), 0.5, comm))[0] == [None, None]


def test_nan_is_the_largest_as_for_torch() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, -math.nan])
    for share in (0.1, 0.5):
        assert math.isnan(exact_quantile(values, share, LocalComm()) or 0.0)
        assert math.isnan(kth(values.tolist(), share))
    assert exact_quantile(values, 0.75, LocalComm()) == kth(values.tolist(), 0.75) == 3.0
