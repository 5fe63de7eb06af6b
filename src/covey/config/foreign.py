"""Names of TRL and ms-swift that are no options here: those that this version refuses, with the reason, and
those that say what covey does anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from covey.config.parallelism import DEVICES, PARALLEL


@dataclass(frozen=True, slots=True)
class Moot:
    """A name whose values say what happens anyway; `values` empty means that any of them does.

    `means` are values that stand for a value of an option.
    """

    words: str
    values: tuple[str, ...] = ()
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_TUNER = "Adapters have the options of the group Adapters in `covey train --help`."
_ENGINES = "covey samples with its own engine (--engine native), with transformers' generate, or with vLLM."
_VLLM = "covey has no option for it; arguments of vLLM's class LLM go into --vllm_engine_kwargs, as JSON."
_ONE_EACH = "vLLM on the training GPUs has one engine in each process (--vllm_mode colocate)."
_WHOLE = "This version samples from the model's whole distribution, so that the loss sees the same one."
_ROLLOUTS = "Every completion is written to rollouts/ in output_dir; --rollout_log says how many."
_SAVING = "Checkpoints are saved every --save_steps optimizer steps and at the end."
_REF = "The reference of the KL term is the model at the start; --sync_ref_model lets it follow the policy."
_QUANT = "Quantization has the options of the group Quantization in `covey train --help`."
_MULTI = "A completion is one answer of the model; this version has no tools and no further turns."
_SPLIT = "The data set's name takes them: --dataset ID:SUBSET@SPLIT."
_OURS = "A tracker takes it from its own environment variables; --report_to and --run_name are ours."
_NO_LOADERS = "Prompts are read before the run starts, so there are no loaders to set."
_GROUPS = "Each process samples and trains; covey does not divide devices into groups."
_EVERY_COLUMN = "Every column of the data set goes to the rewards."
_UPLOAD = "This version uploads nothing."

MOOT: Mapping[str, Moot] = {
    "dataloader_num_workers": Moot(_NO_LOADERS),
    "dataloader_pin_memory": Moot(_NO_LOADERS),
    "dataloader_prefetch_factor": Moot(_NO_LOADERS),
    "dataloader_persistent_workers": Moot(_NO_LOADERS),
    "dataset_num_proc": Moot(_NO_LOADERS),
    "load_from_cache_file": Moot(_NO_LOADERS),
    "lazy_tokenize": Moot(_NO_LOADERS),
    "remove_unused_columns": Moot(_EVERY_COLUMN, ("false",)),
    "dataloader_drop_last": Moot("Each epoch has whole rollouts only.", ("true",)),
    "per_device_eval_batch_size": Moot("As many completions are sampled side by side as memory allows."),
    "do_train": Moot("`covey train` trains.", ("true",)),
    "do_eval": Moot("--eval_strategy says when to evaluate."),
    "logging_first_step": Moot("Every step is logged, the first one too."),
    "logging_dir": Moot("tensorboard's files lie in output_dir/runs."),
    "logging_strategy": Moot("Every --logging_steps steps.", ("steps",)),
    "save_strategy": Moot(_SAVING, ("steps",)),
    "save_safetensors": Moot("Weights are always saved as safetensors.", ("true",)),
    "create_checkpoint_symlink": Moot(_SAVING, ("false",)),
    "add_version": Moot("--output_dir is used as it is; left out, it is counted up under runs/."),
    "log_entropy": Moot("entropy is among the metrics."),
    "gc_collect_after_offload": Moot("It is always done where something is offloaded."),
    "model_type": Moot("The model's own config.json says what it is."),
    "reward_model_type": Moot("The reward model's own config.json says what it is."),
    "reward_model_plugin": Moot(
        "A reward model's one logit is the reward. A model that writes its verdict is --reward_funcs judge; "
        "anything else is a function of yours, FILE.py:NAME.",
        ("default",),
    ),
    "task_type": Moot("`covey train` is GRPO on a causal language model.", ("causal_lm",)),
    "padding_free": Moot("Rows are always packed where the model allows it.", ("true",)),
    "packing": Moot("Rows are always packed where the model allows it.", ("true",)),
    "use_liger_loss": Moot("The logits of a whole batch are never built."),
    "ddp_find_unused_parameters": Moot("Every trained weight takes part in every forward pass."),
    "ddp_backend": Moot("NCCL where there are GPUs, gloo elsewhere.", ("nccl", "gloo")),
    "use_ray": Moot(
        "Without --launcher ray, torchrun starts the processes.", ("false",), {"true": ("launcher", "ray")}
    ),
    "ddp_timeout": Moot("The timeouts of torch.distributed hold."),
    "disable_tqdm": Moot("A terminal gets one live line, a file a few plain ones."),
    "check_model": Moot("A model's files are checked before they are loaded."),
    "ds3_gather_for_generation": Moot("covey gathers the weights itself for each rollout."),
    "fp16": Moot("--torch_dtype says what the forward pass computes in.", ("false",)),
    "load_in_4bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "4")}),
    "load_in_8bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "8")}),
    "top_p": Moot(_WHOLE, ("1", "1.0")),
    "top_k": Moot(_WHOLE, ("-1", "0")),
    "min_p": Moot(_WHOLE, ("0", "0.0")),
    "repetition_penalty": Moot(_WHOLE, ("1", "1.0")),
    "num_beams": Moot(_WHOLE, ("1",)),
    "do_sample": Moot("Completions are always sampled; --temperature sets how.", ("true",)),
    "multi_objective_aggregation": Moot(
        "Rewards are added with --reward_weights before they are compared.",
        ("sum_then_normalize",),
        {"normalize_then_sum": ("scale_rewards", "gdpo")},
    ),
    "vllm_importance_sampling_correction": Moot(
        "What is sampled with the weights in training needs no correction.",
        ("false",),
        {"true": ("vllm_importance_sampling_mode", "sequence_mask")},
    ),
    "push_to_hub": Moot(_UPLOAD, ("false",)),
    "group_by_length": Moot("Rows of a forward pass are packed.", ("false",)),
    "torch_compile": Moot("This version does not compile the model.", ("false",)),
}
"""Names that say what covey does anyway: accepted and said once. Other values than those are refused."""

REFUSED: Mapping[str, str] = {
    "merge_lora": "`covey export CHECKPOINT --merge` merges an adapter into its model.",
    "num_infer_workers": _ONE_EACH,
    "vllm_device": f"{_ONE_EACH} A server of its own has the GPUs that its environment leaves it.",
    "use_lmdeploy": f"{_ENGINES} LMDeploy has left ms-swift too.",
    "use_transformers_continuous_batching": _ENGINES,
    "use_transformers_paged": _ENGINES,
    "device_map": DEVICES,
    **{name: words for name, (words, _) in PARALLEL.items()},
    "device_groups": _GROUPS,
    "colocate_groups": _GROUPS,
    "generation_kwargs": _WHOLE,
    "stop_words": "A completion ends at the model's own end token or at --max_completion_length.",
    "wandb_project": _OURS,
    "num_completions_to_print": _ROLLOUTS,
    "eval_dataset": "Sets to evaluate on are --val_dataset FILE ...",
    "resume_only_model": (
        "To start from saved weights, give them as --model, those of an adapter as --adapters."
    ),
    "ignore_data_skip": "A resumed run goes on in the data where it stopped.",
    "dataset_config": _SPLIT,
    "dataset_train_split": _SPLIT,
    "dataset_test_split": "The split to evaluate on is a source of --val_dataset ID:SUBSET@SPLIT.",
    "custom_dataset_info": "A data set is named by its file or hub id, and --columns renames its columns.",
    "model_init_kwargs": "--torch_dtype, --model_revision and --trust_remote_code are options of their own.",
    "template": "The chat template is the tokenizer's own; --chat_template FILE replaces it.",
    "reward_adapters": (
        "An adapter is merged into its reward model first: `covey export` does it for policies, and peft's "
        "merge_and_unload for classifiers; the directory that comes of it is --reward_model DIR."
    ),
    "reward_template": "A reward model reads with the chat template of its own directory.",
    "multi_turn_scheduler": _MULTI,
    "max_turns": _MULTI,
    "use_gym_env": _MULTI,
    "gym_env": _MULTI,
    "tools": _MULTI,
    "max_tool_calling_iterations": _MULTI,
    "ref_model": _REF,
    "lr_scheduler_kwargs": (
        "--lr_scheduler_type, --warmup_steps and --warmup_ratio are all there is to the schedule."
    ),
    "auto_find_batch_size": (
        "Batch sizes are what you type; the plan lists equal splits that need less memory."
    ),
    "gradient_checkpointing_kwargs": "--gradient_checkpointing true or selective is all there is to it.",
    "ignore_args_error": "An option that does nothing is always refused.",
    "stopping_strategy": "Mixing ends when the first source is used up; without --interleave_prob all are.",
    "val_dataset_shuffle": "Every prompt of --val_dataset is evaluated, so their order is of no matter.",
}
"""Names that this version has nothing for, each with what it does instead."""

REFUSED_PREFIXES: Mapping[str, str] = {
    "vllm_": _VLLM,
    "lora_": _TUNER,
    "bnb_": _QUANT,
    "swanlab_": _OURS,
    "wandb_": _OURS,
    "fsdp_": "Settings of FSDP are given as JSON in --fsdp_config.",
    "hub_": _UPLOAD,
    "teacher_": "This version distils from no teacher.",
    "chord_": "This version mixes in no supervised loss.",
    "freeze_": "What is trained is --tuner_type full or lora.",
    "dataloader_": _NO_LOADERS,
}
"""Beginnings of names that come in families."""

INSTEAD: Mapping[str, str] = {
    "num_infer_workers": "--use_vllm true --nproc_per_node N",
    "vllm_device": "--use_vllm true --vllm_mode colocate",
    "use_lmdeploy": "--use_vllm true",
    "use_transformers_continuous_batching": "--use_vllm true",
    "use_transformers_paged": "--use_vllm true",
    "vllm_": "--vllm_engine_kwargs '{\"NAME\": VALUE}', with vLLM's own name",
    "merge_lora": "`covey export CHECKPOINT --merge` after the run",
    "device_map": "--nproc_per_node N, with --fsdp full_shard where the model is too large for one GPU",
    **{name: instead for name, (_, instead) in PARALLEL.items()},
    "device_groups": "--launcher ray --nproc_per_node N",
    "colocate_groups": "--launcher ray --nproc_per_node N",
    "generation_kwargs": "--temperature X",
    "wandb_project": "WANDB_PROJECT=NAME in front of covey",
    "num_completions_to_print": "--log_completions N",
    "eval_dataset": "--val_dataset FILE",
    "resume_only_model": "--model CHECKPOINT, or --adapters CHECKPOINT",
    "dataset_config": "--dataset ID:SUBSET",
    "dataset_train_split": "--dataset ID@SPLIT",
    "dataset_test_split": "--val_dataset ID@SPLIT",
    "custom_dataset_info": '--dataset FILE --columns \'{"THEIRS": "OURS"}\'',
    "model_init_kwargs": "--torch_dtype, --model_revision or --trust_remote_code",
    "template": "--chat_template FILE",
    "reward_adapters": "--reward_model DIR",
    "ref_model": "--sync_ref_model true",
    "lr_scheduler_kwargs": "--lr_scheduler_type, --warmup_steps or --warmup_ratio",
    "auto_find_batch_size": "--per_device_train_batch_size N",
    "gradient_checkpointing_kwargs": "--gradient_checkpointing true",
    "lora_": "--lora_rank, --lora_alpha or --target_modules",
    "bnb_": "--quant_bits 4, --bnb_4bit_quant_type or --bnb_4bit_use_double_quant",
    "wandb_": "a variable such as WANDB_PROJECT=NAME in front of covey",
    "swanlab_": "a variable such as SWANLAB_API_KEY=KEY in front of covey",
    "fsdp_": "--fsdp_config '{\"NAME\": VALUE}'",
    "hub_": "`hf upload ID CHECKPOINT` after the run",
    "freeze_": "--tuner_type full or lora",
}
"""What to type instead of a refused name, or of a beginning; nothing takes the place of the others."""


def instead_of(name: str) -> str:
    """Return what to type instead of a refused name; empty where there is nothing."""
    beginnings = (beginning for beginning in REFUSED_PREFIXES if name.startswith(beginning))
    return INSTEAD.get(name) or next((INSTEAD.get(beginning, "") for beginning in beginnings), "")
