"""How the logprobs of the engine that sampled go with those of the learner, which has the same weights.

Axes: N trained tokens; the 7 sums of `agreement_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_SUMS = 7
# exp(20) is 5e8: a log ratio beyond it is cut there before it overflows.
_LOG_BOUND = 20.0
# Below this variance all tokens have one logprob, and no line is through them.
_NO_SPREAD = 1e-12


def agreement_sums(engine_N: Tensor, learner_N: Tensor) -> Tensor:
    """Sums in float64 (7,), which add up over micro-batches and ranks: of the tokens, the learner's logprobs
    x, the engine's y, x², xy, and of the ratios r = exp(x - y) and r²."""
    x_N, y_N = learner_N.detach().double(), engine_N.double()
    ratio_N = (x_N - y_N).clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    parts = (torch.ones_like(x_N), x_N, y_N, x_N.square(), x_N * y_N, ratio_N, ratio_N.square())
    return torch.stack([part.sum() for part in parts])


def agreement_metrics(sums: Sequence[float], largest: float | None) -> dict[str, float | None]:
    """The line y = slope x + intercept through the engine's logprobs over the learner's (least squares), the
    largest |y - x|, and the effective sample size (Σr)² / (N Σr²), a share of the tokens.

    With equal weights: slope 1, intercept 0, ess 1. Another temperature T of the engine shows as a slope near
    1 / T. A number is None where there is no token, or no spread for a line.
    """
    count, x, y, xx, xy, r, rr = sums
    spread = count * xx - x * x
    slope = (count * xy - x * y) / spread if count and spread > _NO_SPREAD * count * count else None
    return {
        "sampling/logprob_slope": slope,
        "sampling/logprob_intercept": None if slope is None else (y - slope * x) / count,
        "sampling/logprob_max_gap": largest,
        "sampling/ess": r * r / (count * rr) if rr else None,
    }
