"""vespo: a smooth weight for each sequence.

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from covey.algorithm.loss_types.declare import Average, Loss
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms

# Log ratios of a token beyond this are cut before they are added up, and weights of a sequence at 1e-8.
_LOG_BOUND = 20.0
_LOG_LEAST = math.log(1e-8)


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
    import torch

    from covey.algorithm.ratios import sequence_sums

    log_N = log_weight_N.detach().clamp(-_LOG_BOUND, _LOG_BOUND)
    log_S = sequence_sums(log_N, sequence_N, num_sequences).clamp(_LOG_LEAST, _LOG_BOUND)
    log_N, is_good_N = log_S[sequence_N], advantage_N >= 0
    k_N, rate_N = torch.where(is_good_N, *k), torch.where(is_good_N, *rate)
    return torch.exp(rate_N + k_N * log_N - rate_N * torch.exp(log_N))


def _term(terms: Terms) -> Tensor:
    import torch

    from covey.algorithm.ratios import sequence_means

    inputs, config = terms.inputs, terms.config
    log_weight_N = inputs.logprob_N.detach() - terms.old_N
    if terms.weight_N is not None:
        log_weight_N = log_weight_N + terms.weight_N.clamp_min(1e-8).log()
    num_sequences = inputs.trained_count_S.shape[0]
    phi_N = vespo_weights(
        log_weight_N,
        inputs.advantage_N,
        inputs.sequence_N,
        num_sequences,
        config.vespo_k,
        config.vespo_lambda,
    )
    own_S = sequence_means(phi_N, inputs.sequence_N, inputs.trained_count_S)
    terms.sums["vespo/phi_seq_mean"] = own_S.sum(dtype=torch.float64)
    return -phi_N * inputs.advantage_N * inputs.logprob_N


VESPO = Loss(
    name="vespo",
    place=8,
    summary="weight each sequence smoothly",
    average=Average.TOKENS,
    term=_term,
    options=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ignores=("importance_sampling_level",),
    takes_weights=True,
    sums_of_sequences=("vespo/phi_seq_mean",),
    per_completion=tr(
        "which weights a completion as a whole, by one formula for advantages of 0 or above and by "
        "another for advantages below 0"
    ),
)
