"""Policy losses: `LossInputs -> LossOutput`, with no state, no collectives and no host synchronisation, but
for the length of the longest sequence, which fipo asks for.

Every loss is a per-token value times a weight whose denominator is fixed for the whole optimizer step before
its first backward, so the gradient does not depend on how the step is cut.

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast
from covey.algorithm.correction import Correction, correction_weights
from covey.algorithm.kl import ESTIMATORS, KLEstimator
from covey.algorithm.objectives import (
    cispo_objective,
    clipped_objective,
    fipo_weights,
    future_kl,
    sapo_objective,
    vespo_weights,
)
from covey.algorithm.ratios import Level, ratios, sequence_means
from covey.types import Denominators

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "real", "fipo"]

CLIPPED: frozenset[str] = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "fipo"})
"""Losses of the clipped objective, which epsilon and delta reach."""

_CLIPPED_SUMS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")

SEQUENCE_MEANS: frozenset[str] = frozenset({"vespo/phi_seq_mean"})
"""Sums of a LossOutput that are over sequences; all others are over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What a loss depends on besides its inputs; an option that is None is off.

    `epsilon_high` is the cap itself for cispo. `measures_kl` has the divergence measured where `beta` is 0.
    `tau` is (for A > 0, else) of sapo, `vespo_k` and `vespo_lambda` (for A >= 0, below). `entropy_coef`
    weighs the entropy bonus.
    """

    loss_type: LossType
    epsilon: float
    epsilon_high: float
    delta: float | None = None
    importance_sampling_level: Level = "token"
    beta: float = 0.0
    measures_kl: bool = False
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    tau: tuple[float, float] = (1.0, 1.05)
    vespo_k: tuple[float, float] = (2.0, 3.0)
    vespo_lambda: tuple[float, float] = (3.0, 2.0)
    fipo_decay_rate: float = 32.0
    fipo_clip_range: float = 0.2
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: float | None = 4.0
    real_tau: float = 0.5
    off_policy_delta: float | None = None
    correction: Correction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Flat vectors over trained tokens.

    Every token given is in the loss. `old_logprob_N` None means that the current policy sampled the tokens,
    so the ratio is exactly 1. `trained_count_S` counts the loss tokens of each sequence, `episode_count_S`
    those of its episode over all its sequences, also where they are not in this micro-batch. `keep_N` is 1
    for the tokens whose policy term counts and 0 for the others (None: all count). `contrast` is for `real`.
    """

    logprob_N: Tensor
    old_logprob_N: Tensor | None
    ref_logprob_N: Tensor | None
    advantage_N: Tensor
    sequence_N: Tensor
    trained_count_S: Tensor
    episode_count_S: Tensor
    denominators: Denominators
    sampler_logprob_N: Tensor | None = None
    entropy_N: Tensor | None = None
    keep_N: Tensor | None = None
    contrast: Contrast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The micro-batch's share of the step's loss, and sums over its loss tokens (detached) for the
    metrics."""

    loss: Tensor
    sums: dict[str, Tensor]


def token_weights(inputs: LossInputs, loss_type: LossType) -> Tensor:
    """The weight (N,) of every token in the step's loss.

    grpo and sapo: 1 / (episodes x loss tokens of the token's episode). luspo: 1 / episodes. dr_grpo: 1 /
    (episodes x max_completion_length). All others: 1 / loss tokens of the step. Fully masked episodes count.
    Sources: arXiv:2402.03300, 2511.20347, 2602.05261, 2503.20783, 2503.14476.
    """
    d = inputs.denominators
    if loss_type in ("grpo", "sapo"):
        own_N = inputs.episode_count_S.to(inputs.logprob_N.dtype)[inputs.sequence_N]
        return 1.0 / (own_N * d.num_episodes)
    count = {"dr_grpo": d.num_episodes * d.max_completion_length, "luspo": d.num_episodes}
    return torch.full_like(inputs.advantage_N, 1.0 / max(count.get(loss_type, d.num_tokens), 1))


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The objective of `config.loss_type`, with optional KL term and entropy bonus, aggregated as it says.

    The loss is this micro-batch's summand: the sum over the micro-batches of all ranks is the step's loss.
    Masks and corrections weigh the policy term alone and leave every denominator as it is.
    """
    assert inputs.logprob_N.dtype == torch.float32, "losses are computed in float32"
    assert inputs.logprob_N.shape == inputs.advantage_N.shape == inputs.sequence_N.shape
    logprob_N = inputs.logprob_N
    # exp(x - x.detach()) is exactly 1 and carries the policy gradient.
    old_N = logprob_N.detach() if inputs.old_logprob_N is None else inputs.old_logprob_N
    ratio_N = ratios(
        logprob_N, old_N, inputs.sequence_N, inputs.trained_count_S, config.importance_sampling_level
    )
    sums: dict[str, Tensor] = {}
    weight_N = None
    if config.correction is not None:
        assert inputs.sampler_logprob_N is not None, "a correction needs the sampler's logprobs"
        weight_N, sums = correction_weights(
            old_N, inputs.sampler_logprob_N, inputs.sequence_N, inputs.trained_count_S, config.correction
        )
    if config.loss_type == "real":
        per_token_N, policy = torch.zeros_like(logprob_N), _contrast_loss(inputs, old_N)
    else:
        per_token_N, policy = _objective(inputs, config, old_N, ratio_N, weight_N, sums), None
        for mask_N in _masks(inputs, config, weight_N, sums):
            per_token_N = per_token_N * mask_N
    per_token_N = _with_kl(per_token_N, inputs, config, ratio_N, sums)
    loss = (per_token_N * token_weights(inputs, config.loss_type)).sum()
    if policy is not None:
        loss = loss + policy
    return LossOutput(loss=_with_entropy(loss, inputs, config), sums=sums)


def _objective(
    inputs: LossInputs,
    config: LossConfig,
    old_N: Tensor,
    ratio_N: Tensor,
    weight_N: Tensor | None,
    sums: dict[str, Tensor],
) -> Tensor:
    """The policy term per token (N,); its own metrics join `sums`."""
    advantage_N, logprob_N = inputs.advantage_N, inputs.logprob_N
    if config.loss_type == "cispo":
        is_capped_N = (ratio_N.detach() > config.epsilon_high) & (advantage_N > 0)
        sums["cispo_clip_ratio"] = is_capped_N.sum(dtype=torch.float64)
        return cispo_objective(ratio_N, advantage_N, logprob_N, config.epsilon_high)
    if config.loss_type == "sapo":
        return sapo_objective(ratio_N, advantage_N, *config.tau)
    if config.loss_type == "vespo":
        phi_N = _phi(inputs, config, old_N, weight_N)
        own_S = sequence_means(phi_N, inputs.sequence_N, inputs.trained_count_S)
        sums["vespo/phi_seq_mean"] = own_S.sum(dtype=torch.float64)
        return -phi_N * advantage_N * logprob_N
    if inputs.old_logprob_N is None and (config.delta is None or config.delta >= 1.0):
        # Every ratio is 1, which no clip reaches.
        clipped_N = -ratio_N * advantage_N
        sums.update(dict.fromkeys(_CLIPPED_SUMS, ratio_N.new_zeros((), dtype=torch.float64)))
    else:
        clipped_N = clipped_objective(ratio_N, advantage_N, config.epsilon, config.epsilon_high, config.delta)
        sums.update(_clip_sums(ratio_N.detach(), advantage_N, config))
    if config.loss_type == "fipo":
        clipped_N = clipped_N * _influence(inputs, config, old_N, ratio_N.detach(), sums)
    return clipped_N


def _phi(inputs: LossInputs, config: LossConfig, old_N: Tensor, weight_N: Tensor | None) -> Tensor:
    log_weight_N = inputs.logprob_N.detach() - old_N
    if weight_N is not None:
        log_weight_N = log_weight_N + weight_N.clamp_min(1e-8).log()
    return vespo_weights(
        log_weight_N,
        inputs.advantage_N,
        inputs.sequence_N,
        inputs.trained_count_S.shape[0],
        config.vespo_k,
        config.vespo_lambda,
    )


def _influence(
    inputs: LossInputs, config: LossConfig, old_N: Tensor, ratio_N: Tensor, sums: dict[str, Tensor]
) -> Tensor:
    """FIPO's weight of each token (N,). Tokens whose ratio is above `delta` say nothing of others."""
    log_ratio_N = inputs.logprob_N.detach() - old_N
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
    sums["fipo/future_kl_mean"] = future_N.sum(dtype=torch.float64)
    sums["fipo/influence_weight_mean"] = influence_N.sum(dtype=torch.float64)
    sums["fipo/safety_keep_ratio"] = is_safe_N.sum(dtype=torch.float64)
    return influence_N


def _contrast_loss(inputs: LossInputs, old_N: Tensor) -> Tensor:
    """This micro-batch's share of `real`: the value, and the gradient of each score times its derivative."""
    assert inputs.contrast is not None, "real needs the sums of the whole step"
    log_ratio_N = inputs.logprob_N - old_N
    score_S = sequence_means(log_ratio_N, inputs.sequence_N, inputs.trained_count_S)
    moved_S = score_S - score_S.detach()
    share_S = inputs.contrast.coefficient_S * moved_S + inputs.contrast.value_S
    return torch.where(inputs.trained_count_S > 0, share_S, 0.0).sum()


def _masks(
    inputs: LossInputs, config: LossConfig, weight_N: Tensor | None, sums: dict[str, Tensor]
) -> list[Tensor]:
    """What the policy term of each token (N,) is multiplied by."""
    masks = [] if inputs.keep_N is None else [inputs.keep_N]
    if weight_N is not None and config.loss_type != "vespo":
        masks.append(weight_N)
    if config.off_policy_delta is not None:
        assert inputs.sampler_logprob_N is not None, "the off-policy mask needs the sampler's logprobs"
        gap_S = sequence_means(
            inputs.sampler_logprob_N - inputs.logprob_N.detach(), inputs.sequence_N, inputs.trained_count_S
        )
        is_kept_N = (inputs.advantage_N >= 0) | (gap_S <= config.off_policy_delta)[inputs.sequence_N]
        sums["off_policy_mask/masked_frac"] = (~is_kept_N).sum(dtype=torch.float64)
        masks.append(is_kept_N.to(torch.float32))
    return masks


def _with_kl(
    per_token_N: Tensor, inputs: LossInputs, config: LossConfig, ratio_N: Tensor, sums: dict[str, Tensor]
) -> Tensor:
    """Add the KL term, or measure the divergence alone where that is asked for."""
    if config.beta == 0.0 and not config.measures_kl:
        return per_token_N
    assert inputs.ref_logprob_N is not None, "a KL divergence needs reference logprobs"
    kl_N = ESTIMATORS[config.kl_estimator](inputs.logprob_N, inputs.ref_logprob_N)
    sums["kl"] = kl_N.detach().sum(dtype=torch.float64)
    if config.beta == 0.0:
        return per_token_N
    return per_token_N + config.beta * (kl_N * ratio_N if config.use_bias_correction_kl else kl_N)


def _with_entropy(loss: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Take off `entropy_coef` times the mean entropy of the step's tokens, of those that count."""
    if config.entropy_coef == 0.0:
        return loss
    assert inputs.entropy_N is not None, "an entropy bonus needs entropies"
    entropy_N = inputs.entropy_N if inputs.keep_N is None else inputs.entropy_N * inputs.keep_N
    d = inputs.denominators
    count = d.num_tokens if d.num_kept is None else d.num_kept
    return loss - config.entropy_coef * entropy_N.sum() / max(count, 1)


def _clip_sums(ratio_N: Tensor, advantage_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Counts of tokens whose gradient the clip removes, below and above."""
    low = ((ratio_N < 1.0 - config.epsilon) & (advantage_N < 0)).sum(dtype=torch.float64)
    high = ((ratio_N > 1.0 + config.epsilon_high) & (advantage_N > 0)).sum(dtype=torch.float64)
    return dict(zip(_CLIPPED_SUMS, (low, high, low + high), strict=True))
