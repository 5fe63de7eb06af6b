"""cispo: log-probabilities weighted by the capped ratio.

Axes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from covey.algorithm.loss_types.declare import Average, Loss, Refusal
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms
    from covey.options.schema import Config

# ScaleRL, arXiv:2510.13786.
_CAP = 5.0


def cispo_objective(ratio_N: Tensor, advantage_N: Tensor, logprob_N: Tensor, cap: float) -> Tensor:
    """-min(r, cap) A log p per token; the weight carries no gradient, so no token loses its own.

    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4.
    """
    return -ratio_N.detach().clamp(max=cap) * advantage_N * logprob_N


def _term(terms: Terms) -> Tensor:
    import torch

    inputs, cap = terms.inputs, terms.config.epsilon_high
    is_capped_N = (terms.ratio_N.detach() > cap) & (inputs.advantage_N > 0)
    terms.sums["cispo_clip_ratio"] = is_capped_N.sum(dtype=torch.float64)
    return cispo_objective(terms.ratio_N, inputs.advantage_N, inputs.logprob_N, cap)


def _refuses(config: Config) -> Iterator[Refusal]:
    from covey.types import Fix

    if config.epsilon_high <= 1.0:
        yield Refusal(
            code="E332",
            option="epsilon_high",
            seen=tr(
                "epsilon_high is {epsilon_high:g}, but with loss_type cispo it is the cap of "
                "the ratio itself, not a distance from 1.",
                epsilon_high=config.epsilon_high,
            ),
            cause=tr("The value was probably chosen for a clipped loss, where epsilon is a distance from 1."),
            fixes=(
                Fix(
                    text=tr("the cap that the ScaleRL paper uses, covey's default"),
                    edits={"epsilon_high": _CAP},
                ),
            ),
        )


CISPO = Loss(
    name="cispo",
    place=5,
    summary="weight log-probabilities by the capped ratio",
    average=Average.TOKENS,
    term=_term,
    options=("epsilon_high",),
    cap=_CAP,
    refuses=_refuses,
)
