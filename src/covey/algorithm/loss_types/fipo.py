"""fipo: the clipped ratio, weighted by how much more likely the tokens after a token became.

Axes: N trained tokens of a micro-batch, S its sequences, L tokens of the longest, X tokens of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.algorithm.loss_types.clipped import CLIP_OPTIONS, CLIPS, clipped_term
from covey.algorithm.loss_types.declare import Average, Loss
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms

# Tokens of a block of the discounted sum: the block's matrix is 256 KiB.
_BLOCK = 256
# What the weight is bounded by where a bad completion's token has become far more likely.
_CAREFUL = (0.8, 1.0)


def future_kl(log_ratio_N: Tensor, sequence_N: Tensor, count_S: Tensor, half_life: float) -> Tensor:
    """Sum of the log ratios of a token and those after it in its sequence, halved every `half_life` tokens.

    (N,), tokens in the order of their sequences. Computed in blocks: the memory does not grow with the square
    of the length. Source: FIPO (arXiv:2603.19835).
    """
    import torch

    num, longest = int(count_S.shape[0]), int(count_S.max()) if count_S.numel() else 0
    first_S = torch.cumsum(count_S, 0) - count_S
    place_N = torch.arange(log_ratio_N.shape[0], device=log_ratio_N.device) - first_S[sequence_N]
    ratio_SL = log_ratio_N.new_zeros(num, longest)
    ratio_SL[sequence_N, place_N] = log_ratio_N
    fall = 0.5 ** (1.0 / half_life)
    step_X = torch.arange(_BLOCK, device=log_ratio_N.device)
    distance_XX = step_X[:, None] - step_X[None, :]
    decay_XX = torch.where(distance_XX >= 0, fall ** distance_XX.clamp_min(0), 0.0).to(ratio_SL.dtype)
    out_SL, carry_S1 = torch.empty_like(ratio_SL), ratio_SL.new_zeros(num, 1)
    for start in reversed(range(0, longest, _BLOCK)):
        part = ratio_SL[:, start : start + _BLOCK]
        width = part.shape[1]
        left_X = (fall ** torch.arange(width, 0, -1, device=part.device)).to(part.dtype)
        out = part @ decay_XX[:width, :width] + carry_S1 * left_X
        out_SL[:, start : start + _BLOCK] = out
        carry_S1 = out[:, :1]
    return out_SL[sequence_N, place_N]


def fipo_weights(
    future_N: Tensor,
    ratio_N: Tensor,
    advantage_N: Tensor,
    clip_range: float,
    clip_high_only: bool,
    safety_threshold: float | None,
) -> tuple[Tensor, Tensor]:
    """exp(future KL) within its bounds (N,), and where it is not held back for safety (N,), a bool.

    Bounds are 1 + `clip_range` above and 1, or 1 - `clip_range`, below; 0 is no bound. Where the advantage is
    negative and the ratio above `safety_threshold` the weight lies between 0.8 and 1. Without gradient.
    """
    import torch

    weight_N = torch.exp(future_N)
    if clip_range:
        weight_N = weight_N.clamp(1.0 if clip_high_only else 1.0 - clip_range, 1.0 + clip_range)
    is_safe_N = torch.ones_like(ratio_N, dtype=torch.bool)
    if safety_threshold is not None:
        is_safe_N = (advantage_N >= 0) | (ratio_N <= safety_threshold)
        weight_N = torch.where(is_safe_N, weight_N, weight_N.clamp(*_CAREFUL))
    return weight_N.detach(), is_safe_N


def _term(terms: Terms) -> Tensor:
    return clipped_term(terms) * _influence(terms)


def _influence(terms: Terms) -> Tensor:
    """The weight of each token (N,). Tokens whose ratio is above `delta` say nothing of others."""
    import torch

    inputs, config, ratio_N = terms.inputs, terms.config, terms.ratio_N.detach()
    log_ratio_N = inputs.logprob_N.detach() - terms.old_N
    if config.delta is not None:
        log_ratio_N = torch.where(ratio_N > config.delta, 0.0, log_ratio_N)
    future_N = future_kl(log_ratio_N, inputs.sequence_N, inputs.trained_count_S, config.fipo_decay_rate)
    influence_N, is_safe_N = fipo_weights(
        future_N,
        ratio_N,
        inputs.advantage_N,
        config.fipo_clip_range,
        config.fipo_clip_high_only,
        config.fipo_safety_threshold,
    )
    terms.sums["fipo/future_kl_mean"] = future_N.sum(dtype=torch.float64)
    terms.sums["fipo/influence_weight_mean"] = influence_N.sum(dtype=torch.float64)
    terms.sums["fipo/safety_keep_ratio"] = is_safe_N.sum(dtype=torch.float64)
    return influence_N


FIPO = Loss(
    name="fipo",
    place=10,
    summary=CLIPS,
    average=Average.TOKENS,
    term=_term,
    options=(
        *CLIP_OPTIONS,
        *("fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold"),
    ),
    value_at_1=-1.0,
    per_completion=tr(
        "which weights a token by how much more likely the tokens after it became; those tokens "
        "must have the same advantage"
    ),
)
