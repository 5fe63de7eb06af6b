"""The names people type: our own, those of TRL and ms-swift for the same thing, and those this version
refuses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from covey.config.schema import GROUPS, OPTIONS

ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model",
    "model_id_or_path": "model",
    "dtype": "torch_dtype",
    "bf16": "torch_dtype",
    "dataset_name": "dataset",
    "shuffle_dataset": "dataset_shuffle",
    "max_prompt_length": "max_length",
    "max_new_tokens": "max_completion_length",
    "response_length": "max_completion_length",
    "overlong_filter": "mask_truncated_completions",
}
"""Names that mean one of our options; `bf16` takes true or false, see `bf16_value`."""

HINTS: Mapping[str, str] = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "group_size": "num_generations",
    "n": "num_generations",
    "max_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "kl_coef": "beta",
    "rewards": "reward_funcs",
    "data": "dataset",
    "train_files": "dataset",
    "out": "output_dir",
    "resume": "resume_from_checkpoint",
    "nproc": "nproc_per_node",
    "num_processes": "nproc_per_node",
    "clip_ratio": "epsilon",
}
"""What a name of other tools most likely means; offered as a suggestion, never taken."""

_FULL = "This version trains all weights of the model; there are no adapters."
_VLLM = "This version samples in the training process with its own engine (--engine native)."
_WHOLE = "This version samples from the model's whole distribution, so that the loss sees the same one."
_SHARD = "Each process holds the whole model; this version does not shard it."
_EVAL = "This version has no evaluation during training."
_FILES = "Metrics are always written to metrics.jsonl in output_dir; this version sends them nowhere else."
_ROLLOUTS = "Every completion is written to rollouts/ in output_dir; --rollout_log says how many."
_TOKEN = "This version has the importance ratio per token only."
_LOSS = "This version has the losses grpo, bnpo, dr_grpo and dapo (--loss_type)."
_ADVANTAGE = (
    "Advantages are those of GRPO, the reward against the mean of its group; --scale_rewards sets the "
    "divisor."
)
_PROMPT = "A system message is part of the row's messages; this version adds none."
_LOCAL = "This version reads a model and data from local files: --model DIR --dataset FILE."
_SAVING = "Checkpoints are saved every --save_steps optimizer steps and at the end."
_REF = "The reference of the KL term is the model at the start and stays so."
_QUANT = "Weights are held in float32; this version does not quantise them."
_MULTI = "A completion is one answer of the model; this version has no tools and no further turns."
_REWARD = (
    "Rewards are functions named in --reward_funcs; this version runs no reward models and no plugin files."
)
_ENTROPY = "This version has no entropy term in the loss; entropy itself is among the metrics."

REFUSED: Mapping[str, str] = {
    "rlhf_type": "`covey train` is GRPO; there is nothing to choose.",
    "train_type": _FULL,
    "tuner_type": _FULL,
    "sft_type": _FULL,
    "use_peft": _FULL,
    "adapters": _FULL,
    "target_modules": _FULL,
    "use_dora": _FULL,
    "use_rslora": _FULL,
    "merge_lora": _FULL,
    "fp16": "This version computes in float32 or bfloat16 (--torch_dtype).",
    "load_in_4bit": _QUANT,
    "load_in_8bit": _QUANT,
    "quant_method": _QUANT,
    "quant_bits": _QUANT,
    "use_vllm": _VLLM,
    "sleep_level": _VLLM,
    "num_infer_workers": _VLLM,
    "use_lmdeploy": _VLLM,
    "async_generate": _VLLM,
    "offload_model": _VLLM,
    "offload_optimizer": "The optimizer state stays on its device.",
    "gc_collect_after_offload": "This version offloads nothing, so there is nothing to collect.",
    "move_model_batches": _VLLM,
    "ds3_gather_for_generation": _VLLM,
    "use_transformers_continuous_batching": _VLLM,
    "use_transformers_paged": _VLLM,
    "deepspeed": _SHARD,
    "fsdp": _SHARD,
    "fsdp_config": _SHARD,
    "device_map": _SHARD,
    "tensor_parallel_size": _SHARD,
    "sequence_parallel_size": _SHARD,
    "attn_impl": "covey chooses the attention itself; rows of one forward pass are packed.",
    "attn_implementation": "covey chooses the attention itself; rows of one forward pass are packed.",
    "padding_free": "Rows are always packed where the model allows it.",
    "packing": "Rows are always packed where the model allows it.",
    "use_liger_kernel": "The logits of a whole batch are never built, with no option for it.",
    "torch_compile": "This version does not compile the model.",
    "top_p": _WHOLE,
    "top_k": _WHOLE,
    "min_p": _WHOLE,
    "repetition_penalty": _WHOLE,
    "generation_kwargs": _WHOLE,
    "num_beams": _WHOLE,
    "do_sample": "Completions are always sampled; --temperature sets how.",
    "stop_words": "A completion ends at the model's own end token or at --max_completion_length.",
    "report_to": _FILES,
    "run_name": _FILES,
    "logging_dir": _FILES,
    "wandb_project": _FILES,
    "logging_first_step": "Every step is logged, the first one too.",
    "log_completions": _ROLLOUTS,
    "num_completions_to_print": _ROLLOUTS,
    "log_entropy": "entropy is among the metrics.",
    "eval_steps": _EVAL,
    "eval_strategy": _EVAL,
    "eval_dataset": _EVAL,
    "val_dataset": _EVAL,
    "do_eval": _EVAL,
    "split_dataset_ratio": _EVAL,
    "per_device_eval_batch_size": _EVAL,
    "num_generations_eval": _EVAL,
    "eval_on_start": _EVAL,
    "load_best_model_at_end": _EVAL,
    "metric_for_best_model": _EVAL,
    "save_strategy": _SAVING,
    "save_safetensors": "Weights are always saved as safetensors.",
    "create_checkpoint_symlink": _SAVING,
    "resume_only_model": "To start from saved weights, give them as --model.",
    "ignore_data_skip": "A resumed run goes on in the data where it stopped.",
    "add_version": "--output_dir is used as it is; left out, it is counted up under runs/.",
    "push_to_hub": "This version uploads nothing.",
    "hub_model_id": "This version uploads nothing.",
    "use_hf": _LOCAL,
    "model_revision": _LOCAL,
    "dataset_config": _LOCAL,
    "dataset_train_split": _LOCAL,
    "dataset_test_split": _LOCAL,
    "streaming": _LOCAL,
    "trust_remote_code": "Code that comes with a model is not run.",
    "model_type": "The model's own config.json says what it is.",
    "model_init_kwargs": _LOCAL,
    "system": _PROMPT,
    "template": "The chat template is the tokenizer's own.",
    "enable_thinking": _PROMPT,
    "chat_template": "The chat template is the tokenizer's own.",
    "chat_template_kwargs": "The chat template is the tokenizer's own.",
    "truncation_strategy": "Prompts longer than --max_length are left out and counted.",
    "reward_model": _REWARD,
    "external_plugins": _REWARD,
    "reward_model_plugin": _REWARD,
    "reward_model_name_or_path": _REWARD,
    "multi_turn_scheduler": _MULTI,
    "max_turns": _MULTI,
    "use_gym_env": _MULTI,
    "tools": _MULTI,
    "max_tool_calling_iterations": _MULTI,
    "importance_sampling_level": _TOKEN,
    "advantage_estimator": _ADVANTAGE,
    "kl_in_reward": _ADVANTAGE,
    "multi_objective_aggregation": "Rewards are added up with --reward_weights before they are compared.",
    "tau_pos": _LOSS,
    "tau_neg": _LOSS,
    "sapo_temperature_pos": _LOSS,
    "sapo_temperature_neg": _LOSS,
    "top_entropy_quantile": _ENTROPY,
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _ENTROPY,
    "off_policy_mask_threshold": _TOKEN,
    "off_policy_sequence_mask_delta": _TOKEN,
    "dynamic_sample": (
        "Groups whose rewards are all equal stay in the batch, with advantage 0, and are counted."
    ),
    "max_resample_times": (
        "Groups whose rewards are all equal stay in the batch, with advantage 0, and are counted."
    ),
    "sync_ref_model": _REF,
    "ref_model": _REF,
    "ref_model_sync_steps": _REF,
    "ref_model_mixup_alpha": _REF,
    "optim": "The optimizer is AdamW; its options begin with adam_.",
    "lr_scheduler_kwargs": (
        "--lr_scheduler_type, --warmup_steps and --warmup_ratio are all there is to the schedule."
    ),
    "auto_find_batch_size": (
        "Batch sizes are what you type; the plan lists equal splits that need less memory."
    ),
    "dataloader_num_workers": "Prompts are read before the run starts, so there are no loaders to set.",
    "dataset_num_proc": "Prompts are read before the run starts, so there are no loaders to set.",
    "dataloader_drop_last": "Each epoch has whole rollouts only; what is left over is counted in the plan.",
    "remove_unused_columns": "Every column of the data set goes to the rewards.",
    "gradient_checkpointing_kwargs": "--gradient_checkpointing is on or off.",
    "ignore_args_error": "An option that does nothing is always refused.",
}
"""Names of TRL and ms-swift that this version has nothing for, each with what it does instead."""

REFUSED_PREFIXES: Mapping[str, str] = {
    "vllm_": _VLLM,
    "lora_": _FULL,
    "bnb_": _QUANT,
    "swanlab_": _FILES,
    "wandb_": _FILES,
    "fsdp_": _SHARD,
    "rollout_importance_sampling_": _TOKEN,
    "vespo_": _LOSS,
    "fipo_": _LOSS,
    "sapo_": _LOSS,
    "hub_": "This version uploads nothing.",
    "eval_": _EVAL,
    "teacher_": "This version distils from no teacher.",
    "chord_": "This version mixes in no supervised loss.",
    "freeze_": _FULL,
    "cosine_": "This version has no rewards with options.",
    "soft_": "This version has no rewards with options.",
    "dataloader_": "Prompts are read before the run starts, so there are no loaders to set.",
}
"""Beginnings of names that come in families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What a typed name is: an option, a refused name with the reason, or unknown with the nearest option."""

    typed: str
    option: str | None = None
    refused: str | None = None
    nearest: str | None = None


def normalise(name: str) -> str:
    """Return a name as options are written: lower case, underscores, no leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def look_up(name: str) -> Name:
    """Say what a typed name is."""
    plain = normalise(name)
    if plain in OPTIONS:
        return Name(typed=plain, option=plain)
    if plain in ALIASES:
        return Name(typed=plain, option=ALIASES[plain])
    if plain in REFUSED:
        return Name(typed=plain, refused=REFUSED[plain])
    for prefix, words in REFUSED_PREFIXES.items():
        if plain.startswith(prefix):
            return Name(typed=plain, refused=words)
    return Name(typed=plain, nearest=nearest_option(plain))


def nearest_option(plain: str) -> str | None:
    """Return the option whose name or alias is nearest to an unknown one; None if none is near."""
    if plain in HINTS:
        return HINTS[plain]
    found = nearest(plain, [*OPTIONS, *ALIASES])
    return ALIASES.get(found, found) if found else None


def nearest_group(plain: str) -> str | None:
    """Return the section of a configuration file whose name is nearest."""
    return nearest(plain, list(GROUPS))


def nearest(word: str, words: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """Return the word most like `word`, underscores and case aside; None if none is near."""
    plain = {w.lower().replace("_", ""): w for w in words}
    found = difflib.get_close_matches(
        word.lower().replace("_", "").replace("-", ""), list(plain), n=1, cutoff=cutoff
    )
    return plain[found[0]] if found else None


def bf16_value(value: object) -> object:
    """Return what `bf16 VALUE` says about torch_dtype; anything but a yes or a no is returned as it is."""
    words = {
        "true": "bfloat16",
        "yes": "bfloat16",
        "1": "bfloat16",
        "false": "float32",
        "no": "float32",
        "0": "float32",
    }
    word = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return words.get(str(word).lower(), value)
