"""Ratios of probabilities, of single tokens and of whole sequences.

Axes: N trained tokens of a micro-batch, S its sequences. `sequence_N` says which sequence a token is of; a
micro-batch holds whole sequences, so what is of a sequence is known in it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence", "sequence_token"]


def sequence_sums(value_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Sums (S,) of a value over the tokens of each sequence."""
    return value_N.new_zeros(num_sequences).index_add(0, sequence_N, value_N)


def sequence_means(value_N: Tensor, sequence_N: Tensor, count_S: Tensor) -> Tensor:
    """Means (S,) of a value over the tokens of each sequence; 0 for one without tokens."""
    return sequence_sums(value_N, sequence_N, count_S.shape[0]) / count_S.clamp_min(1)


def ratios(
    logprob_N: Tensor, old_logprob_N: Tensor, sequence_N: Tensor, count_S: Tensor, level: Level
) -> Tensor:
    """The probability ratio of new to old that each token (N,) is weighed with.

    `token`: its own. `sequence`: the geometric mean over its sequence (GSPO, arXiv:2507.18071 eq. 7).
    `sequence_token`: the same value, whose gradient is the token's own (GSPO-token, eq. 13).
    """
    log_ratio_N = logprob_N - old_logprob_N
    if level == "token":
        return torch.exp(log_ratio_N)
    mean_S = sequence_means(log_ratio_N, sequence_N, count_S)
    if level == "sequence":
        return torch.exp(mean_S)[sequence_N]
    return torch.exp(mean_S.detach())[sequence_N] * torch.exp(logprob_N - logprob_N.detach())
