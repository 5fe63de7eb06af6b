"""From the options to the loss, and what the guards may hold it to."""

from __future__ import annotations

import math

from covey.algorithm.correction import Correction
from covey.algorithm.loss_types.registry import LossType, loss_named
from covey.algorithm.losses import LossConfig
from covey.batching.needs import has_entropy_bonus
from covey.options.schema import Config


def loss(config: Config) -> LossConfig:
    """Return the settings of the loss.

    With the KL divergence in the reward its term here is 0 and it is measured alone.
    """
    return LossConfig(
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        importance_sampling_level=config.importance_sampling_level,
        beta=0.0 if config.kl_in_reward else config.beta,
        measures_kl=bool(config.beta or config.beta_end),
        kl_estimator=config.kl_estimator,
        use_bias_correction_kl=config.use_bias_correction_kl,
        entropy_coef=config.entropy_coef,
        tau=(config.tau_pos, config.tau_neg),
        vespo_k=(config.vespo_k_pos, config.vespo_k_neg),
        vespo_lambda=(config.vespo_lambda_pos, config.vespo_lambda_neg),
        fipo_decay_rate=config.fipo_decay_rate,
        fipo_clip_range=config.fipo_clip_range,
        fipo_clip_high_only=config.fipo_clip_high_only,
        fipo_safety_threshold=config.fipo_safety_threshold,
        real_tau=config.real_tau,
        off_policy_delta=config.off_policy_sequence_mask_delta,
        correction=_correction(config),
        own={
            name: getattr(config, name)
            for name in loss_named(config.loss_type).options
            if name not in LossConfig.__dataclass_fields__
        },
    )


def plain_loss(config: Config) -> LossType | None:
    """The loss type where the loss at a ratio of 1 follows from the advantages alone; else None."""
    has_kl = (config.beta or config.beta_end) and not config.kl_in_reward
    is_bounded = config.delta is not None and config.delta < 1.0
    has_value = loss_named(config.loss_type).value_at_1 is not None
    is_plain = has_value and not (has_kl or is_bounded or has_entropy_bonus(config))
    return config.loss_type if is_plain and not _has_masks(config) else None


def is_comparable(config: Config) -> bool:
    """Whether the derivative of the loss at a ratio of 1 is known token by token."""
    is_alone = config.importance_sampling_level == "token" or (
        config.top_entropy_quantile == 1.0 and not (config.beta or config.beta_end)
    )
    has_derivative = loss_named(config.loss_type).derivative_at_1 is not None
    return is_alone and has_derivative and not may_be_silent(config)


def may_be_silent(config: Config) -> bool:
    """Whether rows with advantages may leave no gradient: corrections and masks that depend on logprobs weigh
    them with 0 or next to it, and a comparison of a group has none where its good rows are masked."""
    is_masked = config.off_policy_sequence_mask_delta is not None
    return loss_named(config.loss_type).by_group or is_masked or _correction(config) is not None


def _has_masks(config: Config) -> bool:
    """Whether a part of the tokens leaves the policy term, or is weighed."""
    by_logprob = config.off_policy_sequence_mask_delta is not None or _correction(config) is not None
    return by_logprob or config.top_entropy_quantile < 1.0


def _correction(config: Config) -> Correction | None:
    if config.vllm_importance_sampling_mode is not None:
        least, most = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        return Correction(
            mode=config.vllm_importance_sampling_mode,
            threshold=math.inf if most is None else most,
            floor=least or 0.0,
            is_product=True,
        )
    if config.rollout_importance_sampling_mode is None:
        return None
    return Correction(
        mode=config.rollout_importance_sampling_mode, threshold=config.rollout_importance_sampling_threshold
    )
