"""Memory over 600 steps: whether the process grows."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from cases import Case
from runs import run_side

_STEPS = 600
# Early steps behind the warm-up, and late ones: what only fills up ends between them, what leaks does not.
_FITTED = ((50, 200), (400, _STEPS))
_NATURAL = Case(name="soak", says="", steps=_STEPS - 4)
# The same size in every step: equal lengths, a signal in every group, and siblings that part at once.
_EVEN = replace(
    _NATURAL, name="soak-even", model="ragged", reward="length", forced=True, max_completion_length=12
)
_CASES = {"natural lengths": _NATURAL, "12 forced tokens, random weights": _EVEN}
_MARKS = (1, 10, 50, 100, 200, 300, 400, 500, _STEPS)


def lines(work: Path) -> list[str]:
    """Resident memory at some steps, and its slope, early and late."""
    spans = " | ".join(f"MB per 100 steps, {first} to {last}" for first, last in _FITTED)
    table = [
        f"| resident MB at step | {' | '.join(str(mark) for mark in _MARKS)} | {spans} |",
        f"|---|{'---|' * (len(_MARKS) + len(_FITTED))}",
    ]
    for name, case in _CASES.items():
        # The first value is from before the first step.
        resident = run_side(case, "covey", sys.executable, work)["resident_bytes"][1:]
        megabytes = [value / 1e6 for value in resident]
        slopes = (100 * typical_slope(megabytes[first:last]) for first, last in _FITTED)
        shown = " | ".join(f"{megabytes[mark - 1]:.1f}" for mark in _MARKS)
        table.append(f"| {name} | {shown} | {' | '.join(f'{slope:+.2f}' for slope in slopes)} |")
    return table


def typical_slope(values: Sequence[float]) -> float:
    """The median rise per index over all pairs of values (Theil-Sen), which a single jump does not move."""
    pairs = combinations(enumerate(values), 2)
    return statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
