"""From the options to the settings of single parts: translations without a choice of implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch

from covey.algorithm.correction import Correction
from covey.algorithm.losses import CLIPPED, LossConfig, LossType
from covey.algorithm.needs import Needs
from covey.algorithm.needs import needs as algorithm_needs
from covey.batching.credit import CreditConfig
from covey.batching.shares import PackPlan
from covey.comm import Comm
from covey.config.resolve import Resolved
from covey.config.start import reference_adapter
from covey.data.stop_words import stop_words
from covey.data.text import TextCodec
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.plan.shape import tokens_per_pass
from covey.texts import tr
from covey.training.evaluate import EvalTimes
from covey.training.limits import Limits
from covey.training.objective import EntropyBonus, Objective, OptionSchedule
from covey.types import SamplingParams

# Options that may change over the run, each with its _end and _schedule.
SCHEDULED_OPTIONS = ("temperature", "beta", "epsilon", "entropy_coef")
# What temperature 0 means to an engine that draws: far below any difference of logits.
_GREEDY = 1e-6


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What the forward pass computes in; the masters are float32 always."""
    if config.torch_dtype == "auto":
        low = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if low else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.torch_dtype]


def sampling(config: Config, codec: TextCodec) -> SamplingParams:
    """Return how the completions of training are drawn."""
    words = stop_words(codec, config.stop_words)
    return SamplingParams(
        temperature=max(config.temperature, _GREEDY),
        max_new_tokens=config.max_completion_length,
        stop_token_ids=tuple(dict.fromkeys([*codec.stop_token_ids, *words.token_ids])),
        stop_strings=words.strings,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
    )


def eval_sampling(config: Config, codec: TextCodec) -> SamplingParams:
    """Return how those of evaluations are drawn. At temperature 0 the most probable token is taken, so there
    is nothing to filter."""
    own = replace(sampling(config, codec), temperature=max(config.eval_temperature, _GREEDY))
    if config.eval_temperature <= 0:
        return replace(own, top_p=1.0, top_k=0, min_p=0.0)
    return replace(own, top_p=config.eval_top_p, top_k=config.eval_top_k, min_p=config.eval_min_p)


def reward_weights(config: Config) -> list[float]:
    """One weight per reward."""
    return [float(w) for w in config.reward_weights or [1.0] * len(config.rewards)]


def eval_times(config: Config, plan: BatchPlan) -> EvalTimes:
    """When to evaluate."""
    every = config.eval_steps
    if config.eval_strategy == "epoch":
        every = plan.steps_per_epoch or 0
    return EvalTimes(every=every, on_start=config.eval_on_start)


def loss(config: Config) -> LossConfig:
    """The loss. With the KL divergence in the reward its term here is 0 and it is measured alone."""
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
    )


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


def may_be_silent(config: Config) -> bool:
    """Whether rows with advantages may leave no gradient: corrections and masks that depend on logprobs weigh
    them with 0 or next to it, and `real` has none for a group whose good rows are masked."""
    is_masked = config.off_policy_sequence_mask_delta is not None
    return config.loss_type == "real" or is_masked or _correction(config) is not None


def needs(config: Config, steps_per_rollout: int) -> Needs:
    """What the learner is asked for before a rollout's first update."""
    return algorithm_needs(
        beta=max(config.beta, config.beta_end or 0.0),
        steps_per_rollout=steps_per_rollout,
        kl_in_reward=config.kl_in_reward,
        has_entropy_bonus=_has_entropy_term(config),
        top_entropy_quantile=config.top_entropy_quantile,
    )


def reference_pace(config: Config, policy: Policy) -> dict[str, Any] | None:
    """How a reference follows the policy, or that it has an adapter of its own and stays (`every` 0): the
    last arguments of `MovingReference`. None where it is neither."""
    if not config.sync_ref_model and (policy.adapter is None or reference_adapter(config) is None):
        return None
    every = config.ref_model_sync_steps if config.sync_ref_model else 0
    return {"every": every, "alpha": config.ref_model_mixup_alpha}


def objective(config: Config, total_steps: int) -> Objective:
    """The loss and the credit over the run."""
    ends = {name: getattr(config, f"{name}_end") for name in SCHEDULED_OPTIONS}
    schedules = {
        name: OptionSchedule(start=getattr(config, name), end=end, kind=getattr(config, f"{name}_schedule"))
        for name, end in ends.items()
        if end is not None
    }
    bonus = EntropyBonus(
        coef=config.entropy_coef,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        bounds=(config.entropy_coef_min, config.entropy_coef_max),
    )
    return Objective(
        loss=loss(config),
        credit=credit(config),
        total_steps=total_steps,
        kl_in_reward=config.kl_in_reward,
        schedules=schedules,
        bonus=bonus if config.use_adaptive_entropy else None,
    )


def pack_plan(config: Config, longest: int, policy: Policy, comm: Comm) -> PackPlan:
    """What a forward pass may hold; `longest` are the tokens of the longest prompt."""
    return PackPlan(
        rank=comm.rank,
        world=comm.world,
        completions_per_rank=config.per_device_train_batch_size * config.gradient_accumulation_steps,
        num_iterations=config.num_iterations,
        max_tokens=tokens_per_pass(config, longest_prompt=longest, cpu_model=_cpu_model(policy)),
        max_completion_length=config.max_completion_length,
        stream=policy.stream,
        device=policy.device,
        top_entropy_quantile=config.top_entropy_quantile,
    )


def _cpu_model(policy: Policy) -> tuple[int, int] | None:
    """Width and layers of a model on a CPU, as its config has them."""
    text: Any = policy.model.config
    text = text.get_text_config()
    hidden, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if policy.device.type != "cpu" or hidden is None or layers is None:
        return None
    return hidden, layers


def without_start_options(resolved: Resolved) -> Resolved:
    """The configuration without what is meant for one start: used again, its file must not delete or
    resume."""
    once = ("overwrite_output_dir", "resume_from_checkpoint", "allow_changes", "stop_after_steps")
    defaults = {name: Config.model_fields[name].default for name in once}
    sources = {
        **resolved.sources,
        **dict.fromkeys(once, tr("default (the value given to this start is not kept)")),
    }
    return replace(resolved, config=resolved.config.model_copy(update=defaults), sources=sources)


def limits(config: Config, total_steps: int) -> Limits:
    """Where the run ends."""
    return Limits(
        total_steps=total_steps,
        stop_after=config.stop_after_steps,
        max_minutes=config.max_minutes,
        patience=config.early_stopping_patience,
    )


def credit(config: Config) -> CreditConfig:
    """How rewards become advantages."""
    return CreditConfig(
        scale_rewards=config.scale_rewards,
        mask_truncated_completions=config.mask_truncated_completions,
        estimator=config.advantage_estimator,
        weights=tuple(reward_weights(config)),
        whole_groups=config.loss_type == "real",
        kl_weight=config.beta if config.kl_in_reward else 0.0,
    )


def scaled_by(config: Config) -> Literal["group", "rollout"] | None:
    """Whose spread bounds the advantages."""
    if config.scale_rewards == "gdpo":
        return "rollout"
    units = {("grpo", "group"): "group", ("reinforce_plus_plus", "batch"): "rollout"}
    return units.get((config.advantage_estimator, config.scale_rewards))  # type: ignore[return-value]


def plain_loss(config: Config) -> LossType | None:
    """The loss type where the loss at a ratio of 1 follows from the advantages alone; else None."""
    has_kl = (config.beta or config.beta_end) and not config.kl_in_reward
    is_bounded = config.delta is not None and config.delta < 1.0
    is_plain = config.loss_type in CLIPPED and not (has_kl or is_bounded or _has_entropy_term(config))
    return config.loss_type if is_plain and not _has_masks(config) else None


def is_comparable(config: Config) -> bool:
    """Whether the derivative of the loss at a ratio of 1 is known token by token."""
    is_alone = config.importance_sampling_level == "token" or (
        config.top_entropy_quantile == 1.0 and not (config.beta or config.beta_end)
    )
    return is_alone and not may_be_silent(config)


def _has_masks(config: Config) -> bool:
    """Whether a part of the tokens leaves the policy term, or is weighed."""
    by_logprob = config.off_policy_sequence_mask_delta is not None or _correction(config) is not None
    return by_logprob or config.top_entropy_quantile < 1.0


def _has_entropy_term(config: Config) -> bool:
    return bool(config.entropy_coef or config.entropy_coef_end or config.use_adaptive_entropy)
