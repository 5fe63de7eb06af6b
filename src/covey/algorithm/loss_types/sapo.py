"""sapo: a soft gate in place of the clip.

Axes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.algorithm.loss_types.declare import Average, Loss

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms


def sapo_objective(ratio_N: Tensor, advantage_N: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)) per token, tau by the sign of A: a soft gate in place of the clip.

    At r = 1 its derivative is that of -A r. Source: SAPO (arXiv:2511.20347).
    """
    import torch

    tau_N = torch.where(advantage_N > 0, tau_pos, tau_neg)
    return -advantage_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N


def _term(terms: Terms) -> Tensor:
    return sapo_objective(terms.ratio_N, terms.inputs.advantage_N, *terms.config.tau)


SAPO = Loss(
    name="sapo",
    place=6,
    summary="weight by a soft gate",
    average=Average.EPISODE,
    term=_term,
    options=("tau_pos", "tau_neg"),
)
