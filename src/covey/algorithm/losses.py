"""Policy losses: `LossInputs -> LossOutput`, with no state, no collectives and no host synchronisation.

Every loss is a per-token value times a weight whose denominator is fixed for the whole optimizer step before
its first backward, so the gradient does not depend on how the step is cut.

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covey.types import Denominators

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What a loss depends on besides its inputs; `delta` None is no upper clamp, `beta` 0 no KL term."""

    loss_type: LossType
    epsilon: float
    epsilon_high: float
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Flat vectors over trained tokens.

    Every token given is in the loss. `old_logprob_N` None means that the current policy sampled the tokens,
    so the ratio is exactly 1. `trained_count_S` counts the loss tokens of each sequence.
    """

    logprob_N: Tensor
    old_logprob_N: Tensor | None
    ref_logprob_N: Tensor | None
    advantage_N: Tensor
    sequence_N: Tensor
    trained_count_S: Tensor
    denominators: Denominators


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The micro-batch's share of the step's loss, and sums over its loss tokens (detached) for the
    metrics."""

    loss: Tensor
    sums: dict[str, Tensor]


def k3(logprob_N: Tensor, ref_logprob_N: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token: exp(d) - d - 1 with d = ref - policy.

    Written as expm1(d) - d, whose rounding error in float32 does not average below 0 for small d. Never
    negative but for rounding. Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    difference_N = ref_logprob_N - logprob_N
    return torch.expm1(difference_N) - difference_N


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


def token_weights(inputs: LossInputs, loss_type: LossType) -> Tensor:
    """The weight (N,) of every token in the step's loss.

    grpo: 1 / (sequences x own loss tokens). dapo and bnpo: 1 / loss tokens of the step. dr_grpo: 1 /
    (sequences x max_completion_length). Sequences count fully masked rows. Sources: arXiv:2402.03300,
    2503.14476, 2503.20783.
    """
    d = inputs.denominators
    if loss_type == "grpo":
        own_N = inputs.trained_count_S.to(inputs.logprob_N.dtype)[inputs.sequence_N]
        return 1.0 / (own_N * d.num_sequences)
    count = d.num_sequences * d.max_completion_length if loss_type == "dr_grpo" else d.num_tokens
    return torch.full_like(inputs.advantage_N, 1.0 / max(count, 1))


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The clipped GRPO objective with an optional k3 term, aggregated as `config.loss_type` says.

    The loss is this micro-batch's summand: the sum over the micro-batches of all ranks is the step's loss.
    """
    assert inputs.logprob_N.dtype == torch.float32, "losses are computed in float32"
    assert inputs.logprob_N.shape == inputs.advantage_N.shape == inputs.sequence_N.shape
    logprob_N = inputs.logprob_N
    # exp(x - x.detach()) is exactly 1 and carries the policy gradient.
    old_N = logprob_N.detach() if inputs.old_logprob_N is None else inputs.old_logprob_N
    ratio_N = torch.exp(logprob_N - old_N)
    per_token_N = clipped_objective(
        ratio_N, inputs.advantage_N, config.epsilon, config.epsilon_high, config.delta
    )
    sums: dict[str, Tensor] = {}
    if config.beta != 0.0:
        assert inputs.ref_logprob_N is not None, "beta > 0 needs reference logprobs"
        kl_N = k3(logprob_N, inputs.ref_logprob_N)
        sums["kl"] = kl_N.detach().sum(dtype=torch.float64)
        per_token_N = per_token_N + config.beta * (kl_N * ratio_N if config.use_bias_correction_kl else kl_N)
    loss = (per_token_N * token_weights(inputs, config.loss_type)).sum()
    sums.update(_clip_sums(ratio_N.detach(), inputs.advantage_N, config))
    return LossOutput(loss=loss, sums=sums)


def _clip_sums(ratio_N: Tensor, advantage_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Counts of tokens whose gradient the clip removes, below and above."""
    low = ((ratio_N < 1.0 - config.epsilon) & (advantage_N < 0)).sum(dtype=torch.float64)
    high = ((ratio_N > 1.0 + config.epsilon_high) & (advantage_N > 0)).sum(dtype=torch.float64)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
