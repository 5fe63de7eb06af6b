"""Frozen weights that change, and ranks that part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from covey.checksums import checksum
from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.health.weights import WeightWatch
from support.owners import Held


class _OtherRank(LocalComm):
    """A second rank that reports these values where this one reports its own."""

    world = 2

    def __init__(self, theirs: Sequence[float]) -> None:
        self._theirs = theirs

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima of both ranks' values; only checksums differ, and only as told."""
        if values == [0.0]:
            return list(values)
        sign = -1.0 if values[0] < 0 else 1.0
        return [max(a, sign * b) for a, b in zip(values, self._theirs, strict=True)]


def _tensors(count: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(5, 7).to(dtype) for i in range(count)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_one_bit_changes_a_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    same, other = tensor.clone(), tensor.clone()
    other[3, 2] += 1
    assert checksum(tensor) == checksum(same) != checksum(other)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous())


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_tensor_is_looked_at_in_parts(dtype: torch.dtype) -> None:
    """An embedding of many words has a checksum without a copy of it in 8 bytes a weight."""
    large = torch.ones(5, 4_000_001, dtype=dtype)
    watch = WeightWatch(Held(of_trained={"w": large}))
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    found = checksum(large)
    watch.check_finite(1, LocalComm())
    assert _memory("VmHWM") - before < 4 * large.numel()
    one = torch.ones(1, dtype=dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    assert found == int(one) * large.numel() % 2**50
    large[-1, -1] = float("nan")
    with pytest.raises(GuardStop, match="F128"):
        watch.check_finite(1, LocalComm())


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (10, 10), (64, 64), (200, 64)])
def test_every_frozen_tensor_has_its_turn(count: int, steps: int) -> None:
    for number in range(count):
        frozen = _tensors(count)
        watch = WeightWatch(Held(frozen))
        watch.check(1, LocalComm())
        frozen[f"w{number}"][0, 0] += 1e-3
        with pytest.raises(GuardStop) as stopped:
            for step in range(2, 2 + steps):
                watch.check(step, LocalComm())
        assert stopped.value.finding.code == "F119"
        assert f"w{number}" in stopped.value.finding.seen


def test_a_moving_reference_moves_at_its_syncs_and_only_there() -> None:
    moving = _tensors(3)
    watch = WeightWatch(Held(_tensors(2)), lambda: moving)
    moving["w1"] += 1e-3
    watch.check_sync(2, LocalComm(), is_behind=True)
    for step in range(3, 8):
        watch.check(step, LocalComm())
    with pytest.raises(GuardStop) as stopped:
        watch.check_sync(8, LocalComm(), is_behind=True)
    assert (stopped.value.finding.code, stopped.value.finding.step) == ("F119", 8)
    assert "to be updated from the policy, but did not change" in stopped.value.finding.seen
    watch.check_sync(8, LocalComm(), is_behind=False)  # a policy that has not moved
    moving["w2"] += 1e-3
    with pytest.raises(GuardStop) as stopped:
        for step in range(9, 15):
            watch.check(step, LocalComm())
    assert "reference w2" in stopped.value.finding.seen
    assert "reference model changed between two of its updates" in stopped.value.finding.cause
    watch.record_reference()
    for step in range(9, 15):
        watch.check(step, LocalComm())


def test_ranks_that_part_are_named() -> None:
    trained = _tensors(1)
    mine = float(checksum(trained["w0"]))
    watch = WeightWatch(Held(of_trained=trained))
    watch.check(1, _OtherRank([mine]))
    for theirs in (mine + 1, mine - 1):
        with pytest.raises(GuardStop) as stopped:
            watch.check(2, _OtherRank([theirs]))
        assert (stopped.value.finding.code, stopped.value.finding.step) == ("F121", 2)
        assert "w0" in stopped.value.finding.seen
