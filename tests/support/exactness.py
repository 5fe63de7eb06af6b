"""How far two ways to compute a step are apart, and how far they may be: what the invariances, the contract,
the benches and the tests of backends share with `covey selftest`.

In float32 only the order of sums differs, which moves a gradient by 1e-7 to 2e-6 here; a lost row or a wrong
weight moves it by more than 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from covey.selftest.compare import far
from support.runs import Result

Tensors = Mapping[str, Tensor]

GRADIENT = 1e-5
"""The most by which a gradient may differ, relative to its norm."""
TENSOR = 1e-4
"""The same of each tensor of it that is not rounding alone."""
UPDATE = 1e-3
"""The most by which weights may differ after five AdamW steps, relative to how far they moved."""
LOSS = 1e-6
"""The most by which a loss may differ, whose terms have the size of advantages."""


def norm(tensors: Tensors) -> float:
    """The norm over all tensors, in float64."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def worst(got: Tensors, expected: Tensors, least: float = 1e-6) -> float:
    """The largest relative difference of a tensor, among those above `least` of the norm of all."""
    total = norm(expected)
    sized = {name: t for name, t in expected.items() if norm({name: t}) > least * total}
    return max((far({name: got[name]}, {name: t}) for name, t in sized.items()), default=0.0)


def moved(result: Result) -> dict[str, Tensor]:
    """What training has changed."""
    return {name: after - result.before[name] for name, after in result.after.items()}


def update_gap(actual: Result, expected: Result) -> float:
    """How far the updates of all steps are apart, relative to those of `expected`."""
    return far(moved(actual), moved(expected))


def assert_same_steps(actual: Result, expected: Result, tensors: Sequence[float] = (TENSOR,)) -> None:
    """Equal gradients of as many steps as there are bounds of `tensors`, overall and tensor by tensor, and
    equal updates after all steps."""
    for step, bound in enumerate(tensors):
        got, due = actual.gradients[step], expected.gradients[step]
        assert got.keys() == due.keys()
        assert far(got, due) <= GRADIENT, f"the gradient of step {step} differs by {far(got, due):.2e}"
        assert worst(got, due) <= bound, f"a tensor's gradient of step {step} by {worst(got, due):.2e}"
    assert update_gap(actual, expected) <= UPDATE, f"updates differ by {update_gap(actual, expected):.2e}"


def assert_sees(check: Callable[[Result, Result], None], good: Result) -> None:
    """The comparison is not blind: zeroed, negated or doubled gradients or updates do not pass."""
    for wrong in _spoiled(good):
        with pytest.raises(AssertionError):
            check(wrong, good)


def _spoiled(good: Result) -> Iterator[Result]:
    for factor in (0.0, -1.0, 2.0):
        yield replace(
            good, gradients=[{n: factor * g for n, g in good.gradients[0].items()}, *good.gradients[1:]]
        )
        yield replace(good, after={n: good.before[n] + factor * t for n, t in moved(good).items()})
