"""What a cell is held to: each comparison gives how far it is from the oracle, and how far it may be.

The bounds of float32 are rounding: sums in another order, measured at 1e-7 to 2e-6 of a gradient here. In
bfloat16 the policy itself is rounded, so a backend is as far from the float32 oracle as one process in
bfloat16 is. That is measured anew, as the largest gap of any problem, and a cell may be `SLACK` times as far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from contract.cells import LEARNING_RATE, MAX_GRAD_NORM, STEPS, Cell
from contract.worker import Left
from covey.selftest.compare import far
from support.exactness import GRADIENT, LOSS, TENSOR, norm, worst

Tensors = Mapping[str, Tensor]

SLACK = 3.0


# The largest gaps in float32, beside those of `support.exactness`: of later gradients, of how far weights
# have moved, of norms and other metrics relative to what they are, and of a weight in learning rates.
LATER = 1e-5
MOVEMENT = 3e-5
METRIC = 1e-4
WEIGHT = 1e-3


@dataclass(frozen=True)
class Gap:
    """How far something is from what it should be."""

    what: str
    found: float
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether it may be so; what is no number may not."""
        return self.found <= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.found:.3g}, and {self.bound:.3g} is allowed"


def broken(gaps: Sequence[Gap]) -> list[str]:
    """The gaps that are too large, in words."""
    return [str(gap) for gap in gaps if not gap.is_within]


def gaps(actual: Left, expected: Left, cell: Cell) -> list[Gap]:
    """Everything that a cell is held to, against the oracle."""
    if actual.code is not None or len(actual.gradients) != STEPS or len(actual.metrics) != STEPS:
        return [Gap(f"ended by {actual.code} with {actual.words!r}", math.inf, 0.0)]
    return [
        Gap("tensors that differ in name, order or shape", float(_num_others(actual, expected)), 0.0),
        *_gradient_gaps(actual, expected),
        *_norm_gaps(actual, expected),
        *_step_gaps(actual, expected),
        *_metric_gaps(actual, expected, cell),
        Gap("forward passes that are not as typed", _wrong_passes(actual, cell), 0.0),
    ]


# What bfloat16 does to a single logprob: the least that is allowed of a mean over tokens.
LOW = 1e-2
# The most that is allowed of a norm, so that one that is zeroed or doubled fails however far gradients part.
MOST = 0.5


def widened(found: Sequence[Gap], rounded: Mapping[str, float]) -> list[Gap]:
    """The gaps of a cell in bfloat16, with the bounds that the gaps of one process in bfloat16 give.

    A norm is no further away than its gradient. The weight that is furthest away is that of one rounding, and
    says nothing beside how far all have moved.
    """
    first, later = rounded["gradient"], rounded["gradient of steps 2 to 5"]
    norms = {"logged norm of the first gradient": first, "metric grad_norm": later}

    def bound(gap: Gap) -> float:
        if gap.what in norms:
            return min(MOST, SLACK * norms[gap.what])
        least = LOW if gap.what == "loss" or gap.what.startswith("metric") else gap.bound
        return max(least, SLACK * rounded.get(gap.what, 0.0)) if gap.bound else 0.0

    return [replace(gap, bound=bound(gap)) for gap in found if not gap.what.startswith("weight after")]


def _num_others(actual: Left, expected: Left) -> int:
    shapes = [[(n, tuple(left.gradients[0][n].shape)) for n in left.names] for left in (actual, expected)]
    return sum(one != two for one, two in zip(*shapes, strict=False)) + abs(len(shapes[0]) - len(shapes[1]))


def _gradient_gaps(actual: Left, expected: Left) -> Iterator[Gap]:
    first, oracle = actual.gradients[0], expected.gradients[0]
    yield Gap("gradient", far(first, oracle), GRADIENT)
    # A tensor with next to no gradient is rounding alone.
    yield Gap("gradient of a tensor", worst(first, oracle, 1e-4), TENSOR)


def _norm_gaps(actual: Left, expected: Left) -> Iterator[Gap]:
    logged = [line["grad_norm"] for line in actual.metrics]
    own = [norm(gradient) for gradient in actual.gradients]
    yield Gap("logged norm of its own gradient", _furthest(logged, own), 1e-5)
    oracle = [norm(gradient) for gradient in expected.gradients]
    yield Gap("logged norm of the first gradient", _furthest(logged[:1], oracle[:1]), GRADIENT)
    clipped = [line["grad_norm_clipped"] for line in actual.metrics]
    yield Gap("clipped norm", _furthest(clipped, [MAX_GRAD_NORM] * STEPS), 1e-6)


def _furthest(actual: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - e) / max(abs(e), 1e-30) for a, e in zip(actual, expected, strict=True))


def _step_gaps(actual: Left, expected: Left) -> Iterator[Gap]:
    for step in (1, STEPS):
        moved, oracle = (_moved(left, step) for left in (actual, expected))
        yield Gap(f"movement after step {step}", far(moved, oracle), MOVEMENT)
        apart = max(float((moved[n] - change).abs().max()) for n, change in oracle.items())
        yield Gap(f"weight after step {step}, in learning rates", apart / LEARNING_RATE, WEIGHT)
    later = [far(a, e) for a, e in zip(actual.gradients[1:], expected.gradients[1:], strict=True)]
    yield Gap("gradient of steps 2 to 5", max(later), LATER)
    yield Gap("no weight moves", float(norm(_moved(actual, STEPS)) == 0.0), 0.0)


def _moved(left: Left, step: int) -> Tensors:
    return {name: left.weights[step][name] - start for name, start in left.weights[0].items()}


# What a clock, a machine or a cut says of a run, and the largest gap of a metric that is 0 or nearly so.
_OF_THE_MACHINE = ("time/", "throughput/", "memory/")
_NEXT_TO_NOTHING = 1e-6
# Compared in another way; and what is measured on a part of the weights, another one where they are sharded.
_OTHERWISE = ("loss", "update_ratio", "frac_params_changed")


def _metric_gaps(actual: Left, expected: Left, cell: Cell) -> Iterator[Gap]:
    names = [
        n
        for n, v in expected.metrics[0].items()
        if isinstance(v, int | float) and not n.startswith(_OF_THE_MACHINE) and n not in _OTHERWISE
    ]
    losses = ([line["loss"] for line in left.metrics] for left in (actual, expected))
    # Its terms cancel: what is left of them is no measure of their rounding.
    yield Gap("loss", max(abs(a - e) for a, e in zip(*losses, strict=True)), LOSS)
    for name in names:
        found, oracle = ([line[name] for line in left.metrics] for left in (actual, expected))
        # A share of tokens is a count: where it is small, one token is most of it.
        least = 1.0 if name.startswith("clip_ratio/") else _NEXT_TO_NOTHING
        apart = max(abs(f - o) / max(abs(o), least) for f, o in zip(found, oracle, strict=True))
        yield Gap(f"metric {name}", apart, METRIC)
    if cell.has_kl:
        kl = [line["kl"] for line in actual.metrics]
        yield Gap("KL at step 1", abs(kl[0]), 1e-6)
        yield Gap("KL stays 0 at step 2", float(not kl[1] > 1e-6), 0.0)
    # The comparison of clip ratios is not blind.
    most = max(line["clip_ratio/region_mean"] for line in actual.metrics)
    yield Gap("nothing is clipped", float(not most > 0.0), 0.0)


def _wrong_passes(actual: Left, cell: Cell) -> float:
    """A rank forwards 24 of its 32 rows, and 12 where half of the step's rows have no gradient; one that the
    other rank leaves one row or none forwards twice as many, and the other one makes as many empty passes."""
    if cell.accumulation == 1:
        return sum(passes != 1 for passes in actual.passes)
    rows = 12 if cell.rows in ("an empty half", "a masked half") else 24
    if cell.dealt != "evenly":
        rows = 2 * rows - 1
    return sum(passes < cell.accumulation * rows // 32 for passes in actual.passes)
