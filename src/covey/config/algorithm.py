"""The options of batch, sampling and algorithm."""

from __future__ import annotations

from typing import Literal

from covey.config.inputs import InputOptions, option


class AlgorithmOptions(InputOptions):
    """How completions are drawn, compared and learnt from."""

    # -- batch
    num_generations: int = option(
        "batch", 8, "Completions sampled per prompt, the group they are compared in. At least 2."
    )
    per_device_train_batch_size: int = option(
        "batch",
        8,
        "Completions in one forward pass of one process; the option that decides activation memory.",
    )
    max_tokens_per_micro_batch: int | None = option(
        "batch",
        None,
        "Tokens that one forward pass holds; a longer row passes alone. Unset: per_device_train_batch_size "
        "rows of the longest prompt and completion; on a CPU fewer where that is no slower.",
    )
    gradient_accumulation_steps: int = option(
        "batch",
        ...,
        "Forward passes per optimizer step and process. A step uses processes x "
        "per_device_train_batch_size x this many completions.",
        "8 divided by the number of processes, at least 1; or 1 once another option of the batch size is "
        "typed",
    )
    steps_per_generation: int = option(
        "batch",
        ...,
        "Forward passes per process that one rollout feeds; a multiple of gradient_accumulation_steps. "
        "Equal to it, each optimizer step sees fresh samples (on-policy).",
        "gradient_accumulation_steps, or what generation_batch_size asks for",
    )
    generation_batch_size: int = option(
        "batch",
        ...,
        "Completions per rollout over all processes; another way to say steps_per_generation.",
        "processes x per_device_train_batch_size x steps_per_generation",
    )
    num_iterations: int = option("batch", 1, "How often the optimizer goes over the same rollout.")

    # -- sampling
    max_completion_length: int = option(
        "sampling", 1024, "Longest completion in tokens; a longer one is cut there."
    )
    temperature: float = option(
        "sampling", 1.0, "Sampling temperature, above 0; the loss divides its logits by the same number."
    )
    temperature_end: float | None = option(
        "sampling",
        None,
        "Temperature of the last rollout, reached over the run. Not set: it stays.",
    )
    temperature_schedule: Literal["linear", "cosine"] = option(
        "sampling", "linear", "Schedule of temperature from its start to temperature_end."
    )
    engine: Literal["native", "generate"] = option(
        "sampling",
        "native",
        "What samples: native, the built-in engine on the weights in training; or generate, the method of "
        "transformers, slower and for any model.",
    )

    # -- algorithm
    loss_type: Literal[
        "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "real", "fipo"
    ] = option(
        "algorithm",
        "dapo",
        "The loss. grpo, bnpo, dr_grpo, dapo, luspo and fipo clip the ratio; cispo weighs log probabilities "
        "with the capped ratio; sapo has a soft gate, vespo a smooth weight of the sequence; real tells the "
        "completions of a group apart. grpo and sapo average over each completion first, luspo sums over it, "
        "dr_grpo divides by completions x max_completion_length, the others by the tokens of the step.",
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = option(
        "algorithm",
        "token",
        "Whose probability ratio a token is weighed with: its own; sequence, the geometric mean over its "
        "completion (GSPO); sequence_token, the same with the gradient of the token.",
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = option(
        "algorithm",
        "grpo",
        "What a reward is compared with: grpo, the mean of its group; rloo, the mean of its siblings; "
        "reinforce_plus_plus, the mean of the whole rollout, which works with one completion per prompt too.",
    )
    scale_rewards: Literal["group", "batch", "none", "gdpo"] = option(
        "algorithm",
        ...,
        "What advantages are divided by: the standard deviation within the group, over the whole rollout, "
        "or nothing; gdpo divides each reward by its own spread before they are added. true means group and "
        "false means none.",
        "group; with rloo none, with reinforce_plus_plus batch",
    )
    epsilon: float = option(
        "algorithm", 0.2, "Lower clipping distance of the probability ratio. Without effect while on-policy."
    )
    epsilon_high: float = option(
        "algorithm",
        ...,
        "Upper clipping distance of the probability ratio; with loss_type cispo the cap of the ratio itself.",
        "0.28, or epsilon if that is typed; 5.0 with loss_type cispo",
    )
    epsilon_end: float | None = option(
        "algorithm",
        None,
        "epsilon at the last step; epsilon_high goes with it. Not set: both stay.",
    )
    epsilon_schedule: Literal["linear", "cosine"] = option(
        "algorithm", "linear", "Schedule of epsilon from its start to epsilon_end."
    )
    delta: float | None = option(
        "algorithm",
        None,
        "Upper bound of the ratio also where the advantage is negative; above 1 + epsilon_high.",
    )
    tau_pos: float = option("algorithm", 1.0, "Steepness of sapo's gate where the advantage is above 0.")
    tau_neg: float = option("algorithm", 1.05, "Steepness of sapo's gate elsewhere.")
    vespo_k_pos: float = option(
        "algorithm", 2.0, "Exponent of vespo's weight where the advantage is 0 or above."
    )
    vespo_lambda_pos: float = option(
        "algorithm", 3.0, "Rate of decay of vespo's weight where the advantage is 0 or above."
    )
    vespo_k_neg: float = option("algorithm", 3.0, "Exponent of vespo's weight elsewhere.")
    vespo_lambda_neg: float = option("algorithm", 2.0, "Rate of decay of vespo's weight elsewhere.")
    real_tau: float = option("algorithm", 0.5, "What the scores of real are divided by.")
    fipo_decay_rate: float = option(
        "algorithm", 32.0, "Tokens after which a later token's part in fipo's weight is halved."
    )
    fipo_clip_range: float = option(
        "algorithm", 0.2, "How far fipo's weight may be from 1. 0 does not bound it."
    )
    fipo_clip_high_only: bool = option("algorithm", True, "Let fipo's weight be 1 or more only.")
    fipo_safety_threshold: float | None = option(
        "algorithm",
        4.0,
        "Ratio above which fipo's weight of a token with negative advantage lies between 0.8 and 1.",
    )
    beta: float = option(
        "algorithm", 0.0, "Weight of the KL divergence to the first model. 0 keeps no copy of that model."
    )
    beta_end: float | None = option("algorithm", None, "beta at the last step. Not set: it stays.")
    beta_schedule: Literal["linear", "cosine"] = option(
        "algorithm", "linear", "Schedule of beta from its start to beta_end."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option(
        "algorithm", "k3", "Estimate of the KL divergence per token in the loss. Without effect at beta 0."
    )
    kl_in_reward: bool = option(
        "algorithm",
        False,
        "Take beta times the divergence of a completion (k1, summed) off its reward, and none in the loss.",
    )
    use_bias_correction_kl: bool = option(
        "algorithm", True, "Multiply the KL term by the probability ratio. Without effect at beta 0."
    )
    sync_ref_model: bool = option(
        "algorithm",
        False,
        "Let the reference of the KL divergence follow the policy: every ref_model_sync_steps optimizer "
        "steps it becomes ref_model_mixup_alpha x policy + (1 - ref_model_mixup_alpha) x reference.",
    )
    ref_model_sync_steps: int = option(
        "algorithm", 512, "Optimizer steps between two moves of the reference."
    )
    ref_model_mixup_alpha: float = option(
        "algorithm", 0.6, "The policy's part in a move of the reference, above 0; 1 copies the policy."
    )
    entropy_coef: float = option(
        "algorithm", 0.0, "Weight of the entropy bonus: the mean entropy of the step's tokens."
    )
    entropy_coef_end: float | None = option(
        "algorithm", None, "entropy_coef at the last step. Not set: it stays."
    )
    entropy_coef_schedule: Literal["linear", "cosine"] = option(
        "algorithm", "linear", "Schedule of entropy_coef from its start to entropy_coef_end."
    )
    use_adaptive_entropy: bool = option(
        "algorithm",
        False,
        "Raise entropy_coef by entropy_coef_delta after each step whose entropy is at most entropy_target, "
        "else lower it; the bonus is given only in the first case.",
    )
    entropy_target: float = option("algorithm", 0.2, "Entropy in nats that the adaptive bonus holds.")
    entropy_coef_delta: float = option("algorithm", 0.005, "Step of the adaptive entropy_coef.")
    entropy_coef_min: float = option("algorithm", 0.0, "Least value of the adaptive entropy_coef.")
    entropy_coef_max: float = option("algorithm", 1.0, "Largest value of the adaptive entropy_coef.")
    top_entropy_quantile: float = option(
        "algorithm",
        1.0,
        "Share of the tokens of an optimizer step, those of highest entropy, whose policy term counts.",
    )
    mask_truncated_completions: bool = option(
        "algorithm", False, "Leave completions cut at max_completion_length out of the loss."
    )
    dynamic_sample: bool = option(
        "algorithm",
        False,
        "Replace groups without signal, whose rewards are all equal, by groups of further prompts. Groups "
        "with signal stay.",
    )
    max_resample_times: int = option(
        "algorithm",
        3,
        "How often dynamic_sample draws further prompts for a rollout, each time as many as are missing.",
    )
    replay_buffer_size: int = option(
        "algorithm",
        0,
        "Groups with the most signal to keep of earlier rollouts, which then replace groups without any. 0 "
        "keeps none.",
    )
    off_policy_sequence_mask_delta: float | None = option(
        "algorithm",
        None,
        "Leave out a completion with negative advantage whose tokens have lost more than this many nats on "
        "average since they were sampled.",
    )
    rollout_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = option(
        "algorithm",
        None,
        "Weigh tokens with the ratio of the trainer's to the sampler's probability, of a token or the "
        "geometric mean of its completion; truncate cuts it at the threshold, mask leaves out what is above.",
    )
    rollout_importance_sampling_threshold: float = option("algorithm", 2.0, "Bound of that ratio.")
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = option(
        "algorithm",
        None,
        "The same as TRL means it: of a completion, the product of its tokens' ratios.",
    )
    vllm_importance_sampling_clip_max: float | None = option("algorithm", 3.0, "Upper bound of TRL's ratio.")
    vllm_importance_sampling_clip_min: float | None = option("algorithm", None, "Lower bound of TRL's ratio.")
