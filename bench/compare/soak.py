"""Memory over 200 steps: whether the process grows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cases import Case
from runs import run_side

_STEPS = 200
_FITTED = 150
_CASE = Case(name="soak", says="", steps=_STEPS - 4)


def lines(work: Path) -> list[str]:
    """Resident memory at some steps, and the slope over the last steps with its standard error."""
    # The first value is from before the first step.
    resident = run_side(_CASE, "covey", sys.executable, work)["resident_bytes"][1:]
    megabytes = [value / 1e6 for value in resident]
    slope, error = fitted_slope(megabytes[-_FITTED:])
    marks = (1, 10, 50, 100, 150, _STEPS)
    return [
        f"| step | {' | '.join(str(mark) for mark in marks)} |",
        f"|---|{'---|' * len(marks)}",
        f"| resident MB | {' | '.join(f'{megabytes[mark - 1]:.1f}' for mark in marks)} |",
        "",
        f"Slope over the last {_FITTED} steps: {100 * slope:+.2f} MB per 100 steps, "
        f"standard error {100 * error:.2f}.",
    ]


def fitted_slope(values: Sequence[float]) -> tuple[float, float]:
    """The least-squares slope per index, and its standard error."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    left = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    return slope, (left / (count - 2) / spread) ** 0.5
