"""From the options to the settings of single parts: translations without a choice of implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from covey.algorithm.losses import LossConfig
from covey.batching.credit import CreditConfig
from covey.batching.pack import PackPlan
from covey.comm import Comm
from covey.config.resolve import Resolved
from covey.config.schema import Config
from covey.data.text import TextCodec
from covey.learner.optimizer import OptimizerConfig
from covey.learner.schedule import Schedule
from covey.models.policy import Policy
from covey.plan.batch import BatchPlan
from covey.plan.shape import tokens_per_pass
from covey.training.job import EvalTimes, Limits
from covey.types import SamplingParams

# What temperature 0 means to an engine that draws: far below any difference of logits.
_GREEDY = 1e-6


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What the forward pass computes in; the masters are float32 always."""
    if config.torch_dtype == "auto":
        low = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if low else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.torch_dtype]


def sampling(config: Config, codec: TextCodec, temperature: float) -> SamplingParams:
    """How completions are drawn at a temperature, of which 0 takes the likeliest token."""
    return SamplingParams(
        temperature=max(temperature, _GREEDY),
        max_new_tokens=config.max_completion_length,
        stop_token_ids=codec.stop_token_ids,
    )


def reward_weights(config: Config) -> list[float]:
    """One weight per reward."""
    return [float(w) for w in config.reward_weights or [1.0] * len(config.reward_funcs)]


def eval_times(config: Config, plan: BatchPlan) -> EvalTimes:
    """When to evaluate."""
    every = config.eval_steps
    if config.eval_strategy == "epoch":
        every = plan.steps_per_epoch or 0
    return EvalTimes(every=every, on_start=config.eval_on_start)


def loss(config: Config) -> LossConfig:
    """The loss."""
    return LossConfig(
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        beta=config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
    )


def schedule(config: Config, total_steps: int) -> Schedule:
    """The course of the learning rate."""
    warmup = config.warmup_steps or round(config.warmup_ratio * total_steps)
    return Schedule(
        kind=config.lr_scheduler_type,
        peak=config.learning_rate,
        warmup_steps=warmup,
        total_steps=total_steps,
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
    )


def _cpu_model(policy: Policy) -> tuple[int, int] | None:
    """Width and layers of a model on a CPU, as its config has them."""
    text: Any = policy.model.config
    text = text.get_text_config()
    hidden, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if policy.device.type != "cpu" or hidden is None or layers is None:
        return None
    return hidden, layers


def lasting(resolved: Resolved) -> Resolved:
    """The configuration without what is meant for one start: used again, its file must not delete or
    resume."""
    once = ("overwrite_output_dir", "resume_from_checkpoint", "allow_changes", "stop_after_steps")
    defaults = {name: Config.model_fields[name].default for name in once}
    sources = {**resolved.sources, **dict.fromkeys(once, "default, whatever this start was given")}
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
        scale_rewards=config.scale_rewards, mask_truncated_completions=config.mask_truncated_completions
    )


def optimizer(config: Config) -> OptimizerConfig:
    """AdamW's settings."""
    return OptimizerConfig(
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
