"""Rollout correction: what the engine's numbers differ from the trainer's by, weighed out.

Where the engine that samples rounds otherwise than the model in training, a token was drawn from another
distribution than the one whose gradient is taken. The ratio of the two weighs the token; weights far from 1
are cut (truncated importance sampling, TIS) or taken out (masked, MIS).

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covey.algorithm.ratios import sequence_means, sequence_sums

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

# exp(20) is 5e8: a log ratio beyond it is cut there before it overflows.
_LOG_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How weights are made: of a token or its sequence, cut at `threshold` or set to 0 above it.

    `is_product` takes the product of a sequence's ratios, as TRL does, and otherwise their geometric mean, as
    ms-swift does. `floor` is TRL's lower bound.
    """

    mode: CorrectionMode
    threshold: float
    is_product: bool = False
    floor: float = 0.0


def correction_weights(
    old_logprob_N: Tensor,
    sampler_logprob_N: Tensor,
    sequence_N: Tensor,
    count_S: Tensor,
    correction: Correction,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights (N,) without gradient, and sums over tokens for the metrics.

    Sources: TIS, F. Yao et al. (2025); MIS, verl's documentation of rollout correction. The sums are of the
    weight, of its square and that of the unbounded one, and of the tokens that were cut or taken out.
    """
    log_ratio_N = (old_logprob_N - sampler_logprob_N).detach().clamp(-_LOG_BOUND, _LOG_BOUND)
    if correction.mode.startswith("sequence"):
        of_sequence = (
            sequence_sums(log_ratio_N, sequence_N, count_S.shape[0])
            if correction.is_product
            else sequence_means(log_ratio_N, sequence_N, count_S)
        )
        log_ratio_N = of_sequence.clamp(-_LOG_BOUND, _LOG_BOUND)[sequence_N]
    ratio_N = torch.exp(log_ratio_N)
    is_outside_N = (ratio_N > correction.threshold) | (ratio_N < correction.floor)
    if correction.mode.endswith("truncate"):
        weight_N = ratio_N.clamp(correction.floor, correction.threshold)
    else:
        weight_N = torch.where(is_outside_N, 0.0, ratio_N)
    wide_N, cut_N = ratio_N.double(), weight_N.double()
    return weight_N, {
        "rollout_correction/is_weight_mean": cut_N.sum(),
        "rollout_correction/clipped_frac": is_outside_N.sum(dtype=torch.float64),
        SQUARES: cut_N.square().sum(),
        UNBOUNDED: wide_N.square().sum(),
    }


SQUARES = "rollout_correction/_squares"
UNBOUNDED = "rollout_correction/_unbounded"


def derived_metrics(means: dict[str, float | None]) -> dict[str, float | None]:
    """Replace the means of squares by what is made of them: the effective sample size and chi-square.

    ess is E[w]^2 / E[w^2], a share of the tokens; chi2 is E[r^2] - 1 of the unbounded ratios.
    """
    if SQUARES not in means:
        return means
    out = {name: value for name, value in means.items() if name not in (SQUARES, UNBOUNDED)}
    weight, square = means["rollout_correction/is_weight_mean"], means[SQUARES]
    unbounded = means[UNBOUNDED]
    out["rollout_correction/ess"] = None if weight is None or not square else weight**2 / square
    out["rollout_correction/chi2"] = None if unbounded is None else unbounded - 1.0
    return out
