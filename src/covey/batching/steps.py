"""Credit of steps: what process rewards say of each token of a completion.

Source: DeepSeekMath (arXiv:2402.03300), section 4.1.3. The numbers of all steps of a group are brought to one
scale together, and the advantage of a token is the sum over the steps that end at that token or after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from covey.algorithm.advantages import ScaleRewards, advantages
from covey.types import Score, ScoredGroup
from covey.types.arrays import floats

if TYPE_CHECKING:
    from covey.types.arrays import Floats

RowIndex = tuple[int, int]
"""Group and sibling of a row."""


def step_advantages(
    groups: Sequence[ScoredGroup], counted: Mapping[RowIndex, Score], scale: ScaleRewards
) -> dict[RowIndex, list[float]]:
    """The advantage of each step, for the rows that have rewards of steps; the outcome's advantage is not
    part of it.

    Each process reward is compared on its own, over the steps of all `counted` siblings, and counts with its
    weight.
    """
    advantages: dict[RowIndex, list[float]] = {}
    for part in range(max((len(score.parts) for score in counted.values()), default=0)):
        numbers = {row_index: score.parts[part].steps for row_index, score in counted.items()}
        for row_index, scaled in _scaled(groups, numbers, scale).items():
            spans = counted[row_index].steps
            assert spans is not None
            gains = [spans.weights[part] * gain for gain in accumulate(reversed(scaled))]
            before = advantages.get(row_index, [0.0] * len(gains))
            advantages[row_index] = [a + b for a, b in zip(before, reversed(gains), strict=True)]
    return advantages


def _scaled(
    groups: Sequence[ScoredGroup], numbers: Mapping[RowIndex, tuple[float, ...] | None], scale: ScaleRewards
) -> dict[RowIndex, list[float]]:
    """One reward's numbers, centred and divided; steps of a group stand in one row of a matrix, and a sibling
    that has none keeps one entry that does not count."""
    rows = [
        [(numbers.get((group, sibling)) or (), (group, sibling)) for sibling in range(len(scored.scores))]
        for group, scored in enumerate(groups)
    ]
    padded = [[n for steps, _ in row for n in steps or (None,)] for row in rows]
    width = max(map(len, padded))
    padded = [row + [None] * (width - len(row)) for row in padded]
    reward_PX = torch.tensor([[n or 0.0 for n in row] for row in padded], dtype=torch.float64)
    is_valid_PX = torch.tensor([[n is not None for n in row] for row in padded])
    out_PX = advantages(reward_PX, is_valid_PX, "grpo", "group" if scale == "gdpo" else scale).tolist()
    by_row: dict[RowIndex, list[float]] = {}
    for values, row in zip(out_PX, rows, strict=True):
        start = 0
        for steps, row_index in row:
            if numbers.get(row_index) is not None:
                by_row[row_index] = values[start : start + len(steps)]
            start += max(1, len(steps))
    return by_row


def token_advantages(
    num_trained: int, ends: Sequence[int], of_steps: Sequence[float], outcome: float
) -> Floats:
    """The advantage (N,) of each trained token of a row: that of its step and the row's `outcome`.

    `ends` are the trained tokens up to the end of each step. A row without steps has its outcome alone.
    """
    values = np.full(num_trained, outcome)
    for start, end, gain in zip((0, *ends), ends, of_steps, strict=False):
        values[start:end] = outcome + gain
    return floats(values)
