"""What a token adds to the loss before it is weighed, for each family of losses.

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covey.algorithm.ratios import sequence_sums

# Log ratios of a token beyond this are cut before they are added up, and weights of a sequence at 1e-8.
_LOG_BOUND = 20.0
_LOG_LEAST = math.log(1e-8)
# Tokens of a block of the discounted sum: the block's matrix is 256 KiB.
_BLOCK = 256
# What FIPO's weight is bounded by where a bad completion's token has become far more likely.
_CAREFUL = (0.8, 1.0)


def clipped_objective(
    ratio_N: Tensor, advantage_N: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) per token.

    Source: PPO (arXiv:1707.06347) eq. 7; clip-higher from DAPO (arXiv:2503.14476); `delta` from INTELLECT-2
    (arXiv:2505.07291), which bounds the ratio where the advantage is negative.
    """
    bounded_N = ratio_N if delta is None else ratio_N.clamp(max=delta)
    clipped_N = ratio_N.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    return -torch.minimum(bounded_N * advantage_N, clipped_N * advantage_N)


def cispo_objective(ratio_N: Tensor, advantage_N: Tensor, logprob_N: Tensor, cap: float) -> Tensor:
    """-min(r, cap) A log p per token; the weight carries no gradient, so no token loses its own.

    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4.
    """
    return -ratio_N.detach().clamp(max=cap) * advantage_N * logprob_N


def sapo_objective(ratio_N: Tensor, advantage_N: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)) per token, tau by the sign of A: a soft gate in place of the clip.

    At r = 1 its derivative is that of -A r. Source: SAPO (arXiv:2511.20347).
    """
    tau_N = torch.where(advantage_N > 0, tau_pos, tau_neg)
    return -advantage_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N


def vespo_weights(
    log_weight_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    k: tuple[float, float],
    rate: tuple[float, float],
) -> Tensor:
    """phi(w) = w^k exp(rate (1 - w)) (N,) of w, the product of a sequence's ratios; 1 at w = 1.

    `k` and `rate` are for advantages of 0 and above, and below. Without gradient. Source: VESPO
    (arXiv:2602.10693).
    """
    log_N = log_weight_N.detach().clamp(-_LOG_BOUND, _LOG_BOUND)
    log_S = sequence_sums(log_N, sequence_N, num_sequences).clamp(_LOG_LEAST, _LOG_BOUND)
    log_N, is_good_N = log_S[sequence_N], advantage_N >= 0
    k_N, rate_N = torch.where(is_good_N, *k), torch.where(is_good_N, *rate)
    return torch.exp(rate_N + k_N * log_N - rate_N * torch.exp(log_N))


def future_kl(log_ratio_N: Tensor, sequence_N: Tensor, count_S: Tensor, half_life: float) -> Tensor:
    """Sum of the log ratios of a token and those after it in its sequence, halved every `half_life` tokens.

    (N,), tokens in the order of their sequences. Computed in blocks: the memory does not grow with the square
    of the length. Source: FIPO (arXiv:2603.19835).
    """
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
    weight_N = torch.exp(future_N)
    if clip_range:
        weight_N = weight_N.clamp(1.0 if clip_high_only else 1.0 - clip_range, 1.0 + clip_range)
    is_safe_N = torch.ones_like(ratio_N, dtype=torch.bool)
    if safety_threshold is not None:
        is_safe_N = (advantage_N >= 0) | (ratio_N <= safety_threshold)
        weight_N = torch.where(is_safe_N, weight_N, weight_N.clamp(*_CAREFUL))
    return weight_N.detach(), is_safe_N
