"""Norms of large tensors are those of float64, on any cut into tensors; torch's own are the control."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.learner.optimizer import Masters
from covey.norms import total_norm
from support.options import learner

LARGE = 24_000_001
CONFIG = learner(max_grad_norm=0.0)


@pytest.fixture(scope="module")
def large() -> Tensor:
    """More numbers than torch's float32 norm can add up, not a multiple of anything."""
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def exact(large: Tensor) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in large.split(1 << 20)))


def test_the_norm_of_a_large_tensor_is_that_of_float64(large, exact):
    assert float(total_norm([large])) == pytest.approx(exact, rel=5e-7)
    # What it is there for: torch's own is above the bound by a factor of hundreds.
    assert abs(float(large.norm()) / exact - 1) > 1e-4


def test_a_cut_into_tensors_changes_nothing(large, exact):
    parts = large.split([7_000_003, 1, 1023, 1024, 1025, 0, LARGE - 7_003_076])
    assert float(total_norm(parts)) == pytest.approx(exact, rel=5e-7)
    assert float(total_norm([large.view(1, -1).t()])) == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype(dtype):
    values = torch.randn(3, 1500, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert float(total_norm([values])) == pytest.approx(float(values.double().norm()), rel=5e-7)
    assert float(total_norm([values[:, ::2]])) == pytest.approx(
        float(values[:, ::2].double().norm()), rel=5e-7
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1024, 2047])
def test_what_is_not_finite_shows(bad, place):
    values = torch.zeros(2048)
    values[place] = bad
    assert not math.isfinite(float(total_norm([values[:1500], values[1500:]])))


def test_of_nothing_it_is_zero():
    assert float(total_norm([])) == 0.0
    assert float(total_norm([torch.zeros(0)])) == 0.0


class _Halves:
    """Across two shards of one model, of which this rank has one and the other has the same numbers."""

    def all(self, own: bool) -> bool:
        return own

    def sum(self, values: Tensor) -> Tensor:
        return values * 2


@pytest.mark.parametrize("reduction", [None, _Halves()])
def test_a_step_clips_a_large_gradient_to_its_true_norm(large, exact, reduction):
    module = torch.nn.Linear(1, LARGE, bias=False)
    masters = Masters.of(module, learner(max_grad_norm=2.0), reduction=reduction)
    module.weight.grad = large.clone().view(-1, 1)
    seen: dict[str, Tensor] = {}
    masters._groups[0].adam.step = lambda _: seen.update(clipped=module.weight.grad.clone())  # type: ignore[method-assign]
    stats = masters.step(1e-3)
    whole = exact if reduction is None else exact * math.sqrt(2)
    assert stats.grad_norm == pytest.approx(whole, rel=5e-7)
    assert stats.grad_norm_clipped == 2.0
    clipped = float(seen["clipped"].double().norm())
    assert clipped == pytest.approx(2.0 * exact / whole, rel=1e-6)
