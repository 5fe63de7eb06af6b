"""Policy losses: `LossInputs -> LossOutput`, with no state, no collectives and no host synchronisation, but
for the length of the longest sequence, which fipo asks for.

Every loss is a per-token value times a weight whose denominator is fixed for the whole optimizer step before
its first backward, so the gradient does not depend on how the step is cut.

Axes: N trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast
from covey.algorithm.correction import Correction, correction_weights
from covey.algorithm.kl import ESTIMATORS, KLEstimator
from covey.algorithm.loss_types.declare import Average
from covey.algorithm.loss_types.registry import LossType, loss_named
from covey.algorithm.ratios import Level, ratios, sequence_means
from covey.types import Denominators


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What a loss depends on besides its inputs; an option that is None is off.

    `epsilon_high` is the cap itself for cispo. `measures_kl` has the divergence measured where `beta` is 0.
    `tau` is (for A > 0, else) of sapo, `vespo_k` and `vespo_lambda` (for A >= 0, below). `entropy_coef`
    weighs the entropy bonus. `own` has all options that the loss declares, by name, also those that
    are fields here.
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
    own: Mapping[str, Any] = field(default_factory=dict)


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
class Terms:
    """Hold the tensors (N,) that a loss computes its terms from; a loss adds its own metrics to `sums`.

    `old_N` are the old logprobs, `ratio_N` the ratios of the level that is asked for. `weight_N` is the
    weight of a rollout correction, None without one.
    """

    inputs: LossInputs
    config: LossConfig
    old_N: Tensor
    ratio_N: Tensor
    weight_N: Tensor | None
    sums: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The micro-batch's share of the step's loss, and sums over its loss tokens (detached) for the
    metrics."""

    loss: Tensor
    sums: dict[str, Tensor]


def token_weights(inputs: LossInputs, loss_type: LossType) -> Tensor:
    """The weight (N,) of every token in the step's loss, by the average that its loss declares.

    EPISODE: 1 / (episodes x loss tokens of the token's episode). EPISODES: 1 / episodes. LENGTH: 1 /
    (episodes x max_completion_length). TOKENS: 1 / loss tokens of the step. Fully masked episodes count.
    """
    d = inputs.denominators
    match loss_named(loss_type).average:
        case Average.EPISODE:
            own_N = inputs.episode_count_S.to(inputs.logprob_N.dtype)[inputs.sequence_N]
            return 1.0 / (own_N * d.num_episodes)
        case Average.EPISODES:
            count = d.num_episodes
        case Average.LENGTH:
            count = d.num_episodes * d.max_completion_length
        case Average.TOKENS:
            count = d.num_tokens
        case unknown:
            assert_never(unknown)
    return torch.full_like(inputs.advantage_N, 1.0 / max(count, 1))


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
    terms = Terms(inputs=inputs, config=config, old_N=old_N, ratio_N=ratio_N, weight_N=weight_N, sums=sums)
    loss_type = loss_named(config.loss_type)
    if loss_type.term is None:
        per_token_N = torch.zeros_like(logprob_N)
    else:
        per_token_N = loss_type.term(terms)
        for mask_N in _masks(terms, takes_weights=loss_type.takes_weights):
            per_token_N = per_token_N * mask_N
    policy = None if loss_type.share is None else loss_type.share(terms)
    per_token_N = _with_kl(per_token_N, terms)
    loss = (per_token_N * token_weights(inputs, config.loss_type)).sum()
    if policy is not None:
        loss = loss + policy
    return LossOutput(loss=_with_entropy(loss, inputs, config), sums=sums)


def _masks(terms: Terms, *, takes_weights: bool) -> list[Tensor]:
    """What the policy term of each token (N,) is multiplied by."""
    inputs, config = terms.inputs, terms.config
    masks = [] if inputs.keep_N is None else [inputs.keep_N]
    if terms.weight_N is not None and not takes_weights:
        masks.append(terms.weight_N)
    if config.off_policy_delta is not None:
        assert inputs.sampler_logprob_N is not None, "the off-policy mask needs the sampler's logprobs"
        gap_S = sequence_means(
            inputs.sampler_logprob_N - inputs.logprob_N.detach(), inputs.sequence_N, inputs.trained_count_S
        )
        is_kept_N = (inputs.advantage_N >= 0) | (gap_S <= config.off_policy_delta)[inputs.sequence_N]
        terms.sums["off_policy_mask/masked_frac"] = (~is_kept_N).sum(dtype=torch.float64)
        masks.append(is_kept_N.to(torch.float32))
    return masks


def _with_kl(per_token_N: Tensor, terms: Terms) -> Tensor:
    """Add the KL term, or measure the divergence alone where that is asked for."""
    inputs, config = terms.inputs, terms.config
    if config.beta == 0.0 and not config.measures_kl:
        return per_token_N
    assert inputs.ref_logprob_N is not None, "a KL divergence needs reference logprobs"
    kl_N = ESTIMATORS[config.kl_estimator](inputs.logprob_N, inputs.ref_logprob_N)
    terms.sums["kl"] = kl_N.detach().sum(dtype=torch.float64)
    if config.beta == 0.0:
        return per_token_N
    return per_token_N + config.beta * (kl_N * terms.ratio_N if config.use_bias_correction_kl else kl_N)


def _with_entropy(loss: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Take off `entropy_coef` times the mean entropy of the step's tokens, of those that count."""
    if config.entropy_coef == 0.0:
        return loss
    assert inputs.entropy_N is not None, "an entropy bonus needs entropies"
    entropy_N = inputs.entropy_N if inputs.keep_N is None else inputs.entropy_N * inputs.keep_N
    d = inputs.denominators
    count = d.num_tokens if d.num_kept is None else d.num_kept
    return loss - config.entropy_coef * entropy_N.sum() / max(count, 1)
