"""Losses of the clipped ratio, which differ in their average alone.

Axes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.algorithm.loss_types.declare import Average, Loss

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import LossConfig, Terms

CLIP_OPTIONS = ("epsilon", "epsilon_high", "epsilon_end", "delta")
CLIPS = "clip the probability ratio"

_SUMS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def clipped_objective(
    ratio_N: Tensor, advantage_N: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) per token.

    Source: PPO (arXiv:1707.06347) eq. 7; clip-higher from DAPO (arXiv:2503.14476); `delta` from INTELLECT-2
    (arXiv:2505.07291), which bounds the ratio where the advantage is negative.
    """
    bounded_N = ratio_N if delta is None else ratio_N.clamp(max=delta)
    clipped_N = ratio_N.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    return -(bounded_N * advantage_N).minimum(clipped_N * advantage_N)


def clipped_term(terms: Terms) -> Tensor:
    """Return the clipped objective (N,), and count the tokens whose gradient the clip removes."""
    import torch

    config, ratio_N, advantage_N = terms.config, terms.ratio_N, terms.inputs.advantage_N
    if terms.inputs.old_logprob_N is None and (config.delta is None or config.delta >= 1.0):
        # Every ratio is 1, which no clip reaches.
        terms.sums.update(dict.fromkeys(_SUMS, ratio_N.new_zeros((), dtype=torch.float64)))
        return -ratio_N * advantage_N
    terms.sums.update(_clip_sums(ratio_N.detach(), advantage_N, config))
    return clipped_objective(ratio_N, advantage_N, config.epsilon, config.epsilon_high, config.delta)


def _clip_sums(ratio_N: Tensor, advantage_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Counts of tokens whose gradient the clip removes, below and above."""
    import torch

    low = ((ratio_N < 1.0 - config.epsilon) & (advantage_N < 0)).sum(dtype=torch.float64)
    high = ((ratio_N > 1.0 + config.epsilon_high) & (advantage_N > 0)).sum(dtype=torch.float64)
    return dict(zip(_SUMS, (low, high, low + high), strict=True))


def _clipped(name: str, place: int, average: Average, *, of_sequences: bool = False) -> Loss:
    return Loss(
        name=name,
        place=place,
        summary=CLIPS,
        average=average,
        term=clipped_term,
        options=CLIP_OPTIONS,
        value_at_1=-1.0,
        of_sequences=of_sequences,
    )


# Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, DAPO arXiv:2503.14476, LUSPO arXiv:2602.05261.
GRPO = _clipped("grpo", 1, Average.EPISODE)
BNPO = _clipped("bnpo", 2, Average.TOKENS)
DR_GRPO = _clipped("dr_grpo", 3, Average.LENGTH)
DAPO = _clipped("dapo", 4, Average.TOKENS)
LUSPO = _clipped("luspo", 7, Average.EPISODES, of_sequences=True)
