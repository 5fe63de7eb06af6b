"""How completions are compared and learnt from."""

from __future__ import annotations

from typing import Literal

from covey.algorithm.loss_types.registry import LossType, losses_reading, summary
from covey.options.declare import Options, ReadIf, only_if_set, only_with, option


def _with_losses(option: str) -> ReadIf:
    """Read only with the losses that declare it."""
    return only_with("loss_type", *losses_reading(option))


class AlgorithmOptions(Options):
    """Algorithm."""

    loss_type: LossType = option(
        "dapo",
        f"The loss. {summary()}",
        trl="dapo",
        swift="grpo",
        rlhf="grpo",
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = option(
        "token",
        "Level of the importance ratio. token: each token's own; sequence: the geometric mean over its "
        "completion (GSPO); sequence_token: the same value, with the gradient of the token.",
        trl="token",
        swift="token",
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = option(
        "grpo",
        "Baseline that is subtracted from a reward. grpo: the mean of its group; rloo: the mean of the "
        "other completions in its group; reinforce_plus_plus: the mean of the whole rollout, which also "
        "works with one completion per prompt.",
        swift="grpo",
    )
    scale_rewards: Literal["group", "batch", "none", "gdpo"] = option(
        ...,
        "Scaling of advantages. group: the standard deviation within the group; batch: that over the "
        "whole rollout; none: no scaling; gdpo: each reward is divided by its own standard deviation "
        "before they are summed. true means group and false means none.",
        rule="group; with rloo none, with reinforce_plus_plus batch",
        trl="group",
        swift="group; rloo none, reinforce_plus_plus batch",
        words={"true": "group", "false": "none"},
    )
    epsilon: float = option(
        0.2,
        "Lower clipping distance of the probability ratio. No effect while on-policy.",
        gt=0,
        why="With a clip range of 0 every update is clipped away, and the model learns nothing.",
        trl="0.2",
        swift="0.2",
        rlhf=0.2,
        hints=("clip_ratio",),
        read_if=_with_losses("epsilon"),
    )
    epsilon_high: float = option(
        ...,
        "Upper clipping distance of the probability ratio; with loss_type cispo it is the cap of the "
        "ratio itself.",
        rule="0.28, or epsilon if that is given; 5.0 with loss_type cispo",
        gt=0,
        why="With an upper clip range of 0 the update is clipped away for every good completion.",
        usual=0.28,
        trl="epsilon",
        swift="epsilon",
        read_if=_with_losses("epsilon_high"),
    )
    epsilon_end: float | None = option(
        None,
        "epsilon at the last step; epsilon_high changes with it. Not set: both stay constant.",
        gt=0,
        why="With a clip range of 0 every update is clipped away, and the model learns nothing.",
        read_if=_with_losses("epsilon_end"),
    )
    epsilon_schedule: Literal["linear", "cosine"] = option(
        "linear",
        "Schedule of epsilon from epsilon to epsilon_end.",
        read_if=only_if_set("epsilon_end"),
    )
    delta: float | None = option(
        None,
        "Upper bound of the ratio that also holds where the advantage is negative; it must be above 1 + "
        "epsilon_high.",
        gt=0,
        why="It limits a ratio of two probabilities from above, and such a ratio is always above 0.",
        trl="not set",
        swift="not set",
    )
    tau_pos: float = option(
        1.0,
        "Steepness of sapo's gate where the advantage is above 0.",
        gt=0,
        why="The SAPO loss divides by this temperature, so it has to be above 0.",
        trl="1",
        swift="1",
        names=("sapo_temperature_pos",),
        read_if=_with_losses("tau_pos"),
    )
    tau_neg: float = option(
        1.05,
        "Steepness of sapo's gate where the advantage is 0 or below.",
        gt=0,
        why="The SAPO loss divides by this temperature, so it has to be above 0.",
        trl="1.05",
        swift="1.05",
        names=("sapo_temperature_neg",),
        read_if=_with_losses("tau_neg"),
    )
    vespo_k_pos: float = option(
        2.0,
        "Exponent of vespo's weight where the advantage is 0 or above.",
        ge=0,
        why="With a negative exponent, the least likely completions would get the largest weights.",
        trl="2",
        read_if=_with_losses("vespo_k_pos"),
    )
    vespo_lambda_pos: float = option(
        3.0,
        "Rate of decay of vespo's weight where the advantage is 0 or above.",
        gt=0,
        why="At 0 VESPO's token weight would grow without limit.",
        trl="3",
        read_if=_with_losses("vespo_lambda_pos"),
    )
    vespo_k_neg: float = option(
        3.0,
        "Exponent of vespo's weight where the advantage is below 0.",
        ge=0,
        why="With a negative exponent, the least likely completions would get the largest weights.",
        trl="3",
        read_if=_with_losses("vespo_k_neg"),
    )
    vespo_lambda_neg: float = option(
        2.0,
        "Rate of decay of vespo's weight where the advantage is below 0.",
        gt=0,
        why="At 0 VESPO's token weight would grow without limit.",
        trl="2",
        read_if=_with_losses("vespo_lambda_neg"),
    )
    real_tau: float = option(
        0.5,
        "Number by which the scores of real are divided.",
        gt=0,
        why="The scores of REAL are divided by it.",
        swift="0.5",
        read_if=_with_losses("real_tau"),
    )
    fipo_decay_rate: float = option(
        32.0,
        "Half-life in tokens: a token this far behind counts half as much in fipo's weight.",
        gt=0,
        why="It is a number of tokens.",
        swift="32",
        read_if=_with_losses("fipo_decay_rate"),
    )
    fipo_clip_range: float = option(
        0.2,
        "How far fipo's weight may be from 1. 0: no bound.",
        ge=0,
        lt=1,
        why="It is how far the ratio may be from 1.",
        swift="0.2",
        read_if=_with_losses("fipo_clip_range"),
    )
    fipo_clip_high_only: bool = option(
        True,
        "Only let fipo's weight be 1 or more.",
        swift="true",
        read_if=_with_losses("fipo_clip_high_only"),
    )
    fipo_safety_threshold: float | None = option(
        4.0,
        "Ratio above which fipo's weight of a token with a negative advantage is kept between 0.8 and 1.",
        gt=0,
        why="It limits a ratio of two probabilities from above, and such a ratio is always above 0.",
        swift="4",
        read_if=_with_losses("fipo_safety_threshold"),
    )
    beta: float = option(
        0.0,
        "Weight of the KL divergence from the initial model. 0: no copy of that model is kept.",
        ge=0,
        why="A negative KL coefficient would push the policy away from the reference model.",
        trl="0",
        swift="0.04",
        rlhf=0.04,
        hints=("kl_coef",),
    )
    beta_end: float | None = option(
        None,
        "beta at the last step. Not set: it stays constant.",
        ge=0,
        why="A negative KL coefficient would push the policy away from the reference model.",
    )
    beta_schedule: Literal["linear", "cosine"] = option(
        "linear",
        "Schedule of beta from beta to beta_end.",
        read_if=only_if_set("beta_end"),
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option(
        "k3",
        "Estimator of the KL divergence per token in the loss. No effect if beta is 0.",
        hints=("kl_loss_type",),
    )
    kl_in_reward: bool = option(
        False,
        "Subtract beta times the KL divergence of a completion (k1, summed over tokens) from its reward, "
        "instead of adding a KL term to the loss.",
        swift="false with grpo, else true",
    )
    use_bias_correction_kl: bool = option(
        True,
        "Multiply the KL term by the probability ratio. No effect if beta is 0.",
        trl="true",
        swift="false",
        rlhf=False,
    )
    sync_ref_model: bool = option(
        False,
        "Let the reference model of the KL divergence follow the policy: every ref_model_sync_steps "
        "optimizer steps it becomes ref_model_mixup_alpha x policy + (1 - ref_model_mixup_alpha) x "
        "reference.",
        trl="false",
        swift="false",
    )
    ref_model_sync_steps: int = option(
        512,
        "Optimizer steps between two updates of the reference model.",
        ge=1,
        why="It is a number of optimizer steps.",
        trl="512",
        swift="512",
        read_if=only_with("sync_ref_model", True),
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "Weight of the policy when the reference model is updated, above 0; 1 copies the policy.",
        gt=0,
        le=1,
        why="It is the share of the policy in the new reference model; at 0 the reference model would "
        "never change.",
        trl="0.6",
        swift="0.6",
        read_if=only_with("sync_ref_model", True),
    )
    entropy_coef: float = option(
        0.0,
        "Weight of the entropy bonus, which is the mean entropy of the tokens in the step.",
        ge=0,
        why="A negative entropy coefficient would reduce exploration instead of increasing it.",
        trl="0",
    )
    entropy_coef_end: float | None = option(
        None,
        "entropy_coef at the last step. Not set: it stays constant.",
        ge=0,
        why="A negative entropy coefficient would reduce exploration instead of increasing it.",
    )
    entropy_coef_schedule: Literal["linear", "cosine"] = option(
        "linear",
        "Schedule of entropy_coef from entropy_coef to entropy_coef_end.",
        read_if=only_if_set("entropy_coef_end"),
    )
    use_adaptive_entropy: bool = option(
        False,
        "Raise entropy_coef by entropy_coef_delta after each step whose entropy is at most "
        "entropy_target, and lower it otherwise; the bonus is only used in the first case.",
        trl="false",
    )
    entropy_target: float = option(
        0.2,
        "Target of the entropy in nats for use_adaptive_entropy.",
        ge=0,
        why="An entropy is never below 0.",
        trl="0.2",
        read_if=only_with("use_adaptive_entropy", True),
    )
    entropy_coef_delta: float = option(
        0.005,
        "Step size of the adaptive entropy_coef.",
        gt=0,
        why="At 0 the entropy coefficient would never change.",
        trl="0.005",
        read_if=only_with("use_adaptive_entropy", True),
    )
    entropy_coef_min: float = option(
        0.0,
        "Smallest value of the adaptive entropy_coef.",
        ge=0,
        why="A negative entropy coefficient would reduce exploration instead of increasing it.",
        trl="0",
        read_if=only_with("use_adaptive_entropy", True),
    )
    entropy_coef_max: float = option(
        1.0,
        "Largest value of the adaptive entropy_coef.",
        trl="1",
        read_if=only_with("use_adaptive_entropy", True),
    )
    top_entropy_quantile: float = option(
        1.0,
        "Share of the tokens in an optimizer step that count in the policy term: those with the highest "
        "entropy.",
        gt=0,
        le=1,
        why="It is a share of the tokens.",
        trl="1",
        swift="1",
    )
    mask_truncated_completions: bool = option(
        False,
        "Leave completions cut at max_completion_length out of the loss.",
        trl="false",
        swift="false",
        names=("overlong_filter",),
    )
    dynamic_sample: bool = option(
        False,
        "Replace groups without signal, in which all rewards are equal, by groups of new prompts. Groups "
        "with signal are kept.",
        swift="false",
    )
    max_resample_times: int = option(
        3,
        "How often dynamic_sample draws new prompts for a rollout; each time it draws as many as are "
        "missing.",
        ge=1,
        why="With 0 attempts no group without signal could be replaced.",
        swift="3",
        read_if=only_with("dynamic_sample", True),
    )
    replay_buffer_size: int = option(
        0,
        "Number of groups to keep from earlier rollouts, those with the most signal; they replace groups "
        "without signal. 0: keep none.",
        ge=0,
        why="It is a number of groups; 0 keeps none.",
        trl="64 in GRPOWithReplayBufferConfig",
    )
    off_policy_sequence_mask_delta: float | None = option(
        None,
        "Leave out completions with a negative advantage whose log-probability has dropped by more than "
        "this many nats per token since they were sampled.",
        gt=0,
        why="It is a threshold for the mean drop in log-probability, so it has to be above 0.",
        trl="not set",
        swift="not set",
        names=("off_policy_mask_threshold",),
    )
    rollout_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = option(
        None,
        "Weight tokens by the ratio of the trainer's probability to the sampler's, per token or as the "
        "geometric mean of the completion. truncate: limit the ratio to the threshold; mask: leave out "
        "what is above the threshold.",
        swift="not set",
    )
    rollout_importance_sampling_threshold: float = option(
        2.0,
        "Upper bound of the ratio in rollout_importance_sampling_mode.",
        gt=0,
        why="It is compared with a ratio of two probabilities, which is never negative.",
        swift="2",
        read_if=only_if_set("rollout_importance_sampling_mode"),
    )
    use_decoupled_loss: bool = option(
        False,
        "For tokens of earlier weights: ratios against the weights that begin to train on the rollout.",
    )
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = option(
        None,
        "rollout_importance_sampling_mode as TRL has it: of a completion the product of its tokens' ratios.",
        trl="sequence_mask",
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0,
        "Upper bound of the ratio in vllm_importance_sampling_mode.",
        gt=0,
        why="It is compared with a ratio of two probabilities, which is never negative.",
        trl="3",
        names=("vllm_importance_sampling_cap",),
        read_if=only_if_set("vllm_importance_sampling_mode"),
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None,
        "Lower bound of the ratio in vllm_importance_sampling_mode.",
        ge=0,
        why="It is compared with a ratio of two probabilities, which is never negative.",
        trl="not set",
        read_if=only_if_set("vllm_importance_sampling_mode"),
    )
