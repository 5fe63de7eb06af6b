"""Names of TRL and ms-swift that are no options here: those that this version refuses, with the reason, and
those that say what covey does anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from covey.config.parallelism import DEVICES, PARALLEL
from covey.texts import tr


@dataclass(frozen=True, slots=True)
class Moot:
    """A name whose values say what happens anyway; `values` empty means that any of them does.

    `means` are values that stand for a value of an option.
    """

    words: str
    values: tuple[str, ...] = ()
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_TUNER = tr("Adapters have the options of the group Adapters in `covey train --help`.")
_ENGINES = tr(
    "covey samples with its own engine (--engine native), with transformers' generate, or with vLLM."
)
_VLLM = tr("covey has no option for it; arguments of vLLM's class LLM go into --vllm_engine_kwargs, as JSON.")
_ONE_EACH = tr("vLLM on the training GPUs has one engine in each process (--vllm_mode colocate).")
_WHOLE = tr("This version samples from the model's whole distribution, so that the loss sees the same one.")
_ROLLOUTS = tr("Every completion is written to rollouts/ in output_dir; --rollout_log says how many.")
_SAVING = tr("Checkpoints are saved every --save_steps optimizer steps and at the end.")
_REF = tr(
    "The reference of the KL term is the model at the start; --sync_ref_model lets it follow the policy."
)
_QUANT = tr("Quantization has the options of the group Quantization in `covey train --help`.")
_MULTI = tr("A completion is one answer of the model; this version has no tools and no further turns.")
_SPLIT = tr("The data set's name takes them: --dataset ID:SUBSET@SPLIT.")
_OURS = tr("A tracker takes it from its own environment variables; --report_to and --run_name are ours.")
_NO_LOADERS = tr("Prompts are read before the run starts, so there are no loaders to set.")
_GROUPS = tr("Each process samples and trains; covey does not divide devices into groups.")
_EVERY_COLUMN = tr("Every column of the data set goes to the rewards.")
_UPLOAD = tr("This version uploads nothing.")
_PLANNED = tr("`covey plan` reads how the model is sharded and offloaded from the options of the run.")

MOOT: Mapping[str, Moot] = {
    "dataloader_num_workers": Moot(_NO_LOADERS),
    "dataloader_pin_memory": Moot(_NO_LOADERS),
    "dataloader_prefetch_factor": Moot(_NO_LOADERS),
    "dataloader_persistent_workers": Moot(_NO_LOADERS),
    "dataset_num_proc": Moot(_NO_LOADERS),
    "load_from_cache_file": Moot(_NO_LOADERS),
    "lazy_tokenize": Moot(_NO_LOADERS),
    "remove_unused_columns": Moot(_EVERY_COLUMN, ("false",)),
    "dataloader_drop_last": Moot(tr("Each epoch has whole rollouts only."), ("true",)),
    "per_device_eval_batch_size": Moot(tr("As many completions are sampled side by side as memory allows.")),
    "do_train": Moot(tr("`covey train` trains."), ("true",)),
    "do_eval": Moot(tr("--eval_strategy says when to evaluate.")),
    "logging_first_step": Moot(tr("Every step is logged, the first one too.")),
    "logging_dir": Moot(tr("tensorboard's files lie in output_dir/runs.")),
    "logging_strategy": Moot(tr("Every --logging_steps steps."), ("steps",)),
    "save_strategy": Moot(_SAVING, ("steps",)),
    "save_safetensors": Moot(tr("Weights are always saved as safetensors."), ("true",)),
    "create_checkpoint_symlink": Moot(_SAVING, ("false",)),
    "add_version": Moot(tr("--output_dir is used as it is; left out, it is counted up under runs/.")),
    "log_entropy": Moot(tr("entropy is among the metrics.")),
    "gc_collect_after_offload": Moot(tr("It is always done where something is offloaded.")),
    "model_type": Moot(tr("The model's own config.json says what it is.")),
    "reward_model_type": Moot(tr("The reward model's own config.json says what it is.")),
    "reward_model_plugin": Moot(
        tr(
            "A reward model's one logit is the reward. A model that writes its verdict is "
            "--reward_funcs judge; anything else is a function of yours, FILE.py:NAME."
        ),
        ("default",),
    ),
    "task_type": Moot(tr("`covey train` is GRPO on a causal language model."), ("causal_lm",)),
    "padding_free": Moot(tr("Rows are always packed where the model allows it."), ("true",)),
    "packing": Moot(tr("Rows are always packed where the model allows it."), ("true",)),
    "use_liger_loss": Moot(tr("The logits of a whole batch are never built.")),
    "ddp_find_unused_parameters": Moot(tr("Every trained weight takes part in every forward pass.")),
    "ddp_backend": Moot(tr("NCCL where there are GPUs, gloo elsewhere."), ("nccl", "gloo")),
    "use_ray": Moot(
        tr("Without --launcher ray, torchrun starts the processes."),
        ("false",),
        {"true": ("launcher", "ray")},
    ),
    "ddp_timeout": Moot(tr("The timeouts of torch.distributed hold.")),
    "disable_tqdm": Moot(tr("A terminal gets one live line, a file a few plain ones.")),
    "check_model": Moot(tr("A model's files are checked before they are loaded.")),
    "ds3_gather_for_generation": Moot(tr("covey gathers the weights itself for each rollout.")),
    "fp16": Moot(tr("--torch_dtype says what the forward pass computes in."), ("false",)),
    "load_in_4bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "4")}),
    "load_in_8bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "8")}),
    "top_p": Moot(_WHOLE, ("1", "1.0")),
    "top_k": Moot(_WHOLE, ("-1", "0")),
    "min_p": Moot(_WHOLE, ("0", "0.0")),
    "repetition_penalty": Moot(_WHOLE, ("1", "1.0")),
    "num_beams": Moot(_WHOLE, ("1",)),
    "do_sample": Moot(tr("Completions are always sampled; --temperature sets how."), ("true",)),
    "multi_objective_aggregation": Moot(
        tr("Rewards are added with --reward_weights before they are compared."),
        ("sum_then_normalize",),
        {"normalize_then_sum": ("scale_rewards", "gdpo")},
    ),
    "vllm_importance_sampling_correction": Moot(
        tr("What is sampled with the weights in training needs no correction."),
        ("false",),
        {"true": ("vllm_importance_sampling_mode", "sequence_mask")},
    ),
    "push_to_hub": Moot(_UPLOAD, ("false",)),
    "group_by_length": Moot(tr("Rows of a forward pass are packed."), ("false",)),
    "torch_compile": Moot(tr("This version does not compile the model."), ("false",)),
}
"""Names that say what covey does anyway: accepted and said once. Other values than those are refused."""

REFUSED: Mapping[str, str] = {
    "merge_lora": tr("`covey export CHECKPOINT --merge` merges an adapter into its model."),
    "num_infer_workers": _ONE_EACH,
    "vllm_device": tr(
        "{one_each} A server of its own has the GPUs that its environment leaves it.", one_each=_ONE_EACH
    ),
    "use_lmdeploy": tr("{engines} LMDeploy has left ms-swift too.", engines=_ENGINES),
    "use_transformers_continuous_batching": _ENGINES,
    "use_transformers_paged": _ENGINES,
    "device_map": DEVICES,
    **{name: words for name, (words, _) in PARALLEL.items()},
    "device_groups": _GROUPS,
    "colocate_groups": _GROUPS,
    "generation_kwargs": _WHOLE,
    "stop_words": tr("A completion ends at the model's own end token or at --max_completion_length."),
    "wandb_project": _OURS,
    "num_completions_to_print": _ROLLOUTS,
    "eval_dataset": tr("Sets to evaluate on are --val_dataset FILE ..."),
    "resume_only_model": (
        tr("To start from saved weights, give them as --model, those of an adapter as --adapters.")
    ),
    "ignore_data_skip": tr("A resumed run goes on in the data where it stopped."),
    "dataset_config": _SPLIT,
    "dataset_train_split": _SPLIT,
    "dataset_test_split": tr("The split to evaluate on is a source of --val_dataset ID:SUBSET@SPLIT."),
    "custom_dataset_info": tr(
        "A data set is named by its file or hub id, and --columns renames its columns."
    ),
    "model_init_kwargs": tr(
        "--torch_dtype, --model_revision and --trust_remote_code are options of their own."
    ),
    "template": tr("The chat template is the tokenizer's own; --chat_template FILE replaces it."),
    "reward_adapters": (
        tr(
            "An adapter is merged into its reward model first: `covey export` does it for policies, "
            "and peft's merge_and_unload for classifiers; the directory that comes of it is "
            "--reward_model DIR."
        )
    ),
    "reward_template": tr("A reward model reads with the chat template of its own directory."),
    "multi_turn_scheduler": _MULTI,
    "max_turns": _MULTI,
    "use_gym_env": _MULTI,
    "gym_env": _MULTI,
    "tools": _MULTI,
    "max_tool_calling_iterations": _MULTI,
    "ref_model": _REF,
    "lr_scheduler_kwargs": (
        tr("--lr_scheduler_type, --warmup_steps and --warmup_ratio are all there is to the schedule.")
    ),
    "auto_find_batch_size": (
        tr("Batch sizes are what you type; the plan lists equal splits that need less memory.")
    ),
    "gradient_checkpointing_kwargs": tr("--gradient_checkpointing true or selective is all there is to it."),
    "ignore_args_error": tr("An option that does nothing is always refused."),
    "stopping_strategy": tr(
        "Mixing ends when the first source is used up; without --interleave_prob all are."
    ),
    "plan_zero_stage": _PLANNED,
    "plan_offload": _PLANNED,
    "val_dataset_shuffle": tr("Every prompt of --val_dataset is evaluated, so their order is of no matter."),
}
"""Names that this version has nothing for, each with what it does instead."""

REFUSED_PREFIXES: Mapping[str, str] = {
    "vllm_": _VLLM,
    "lora_": _TUNER,
    "bnb_": _QUANT,
    "swanlab_": _OURS,
    "wandb_": _OURS,
    "fsdp_": tr("Settings of FSDP are given as JSON in --fsdp_config."),
    "hub_": _UPLOAD,
    "teacher_": tr("This version distils from no teacher."),
    "chord_": tr("This version mixes in no supervised loss."),
    "freeze_": tr("What is trained is --tuner_type full or lora."),
    "dataloader_": _NO_LOADERS,
}
"""Beginnings of names that come in families."""

INSTEAD: Mapping[str, str] = {
    "num_infer_workers": tr("--use_vllm true --nproc_per_node N"),
    "vllm_device": tr("--use_vllm true --vllm_mode colocate"),
    "use_lmdeploy": tr("--use_vllm true"),
    "use_transformers_continuous_batching": tr("--use_vllm true"),
    "use_transformers_paged": tr("--use_vllm true"),
    "vllm_": tr("--vllm_engine_kwargs '{\"NAME\": VALUE}', with vLLM's own name"),
    "merge_lora": tr("`covey export CHECKPOINT --merge` after the run"),
    "device_map": tr("--nproc_per_node N, with --fsdp full_shard where the model is too large for one GPU"),
    **{name: instead for name, (_, instead) in PARALLEL.items()},
    "device_groups": tr("--launcher ray --nproc_per_node N"),
    "colocate_groups": tr("--launcher ray --nproc_per_node N"),
    "generation_kwargs": "--temperature X",
    "wandb_project": tr("WANDB_PROJECT=NAME in front of covey"),
    "num_completions_to_print": "--log_completions N",
    "eval_dataset": "--val_dataset FILE",
    "resume_only_model": tr("--model CHECKPOINT, or --adapters CHECKPOINT"),
    "dataset_config": "--dataset ID:SUBSET",
    "dataset_train_split": "--dataset ID@SPLIT",
    "dataset_test_split": "--val_dataset ID@SPLIT",
    "custom_dataset_info": tr('--dataset FILE --columns \'{"THEIRS": "OURS"}\''),
    "model_init_kwargs": tr("--torch_dtype, --model_revision or --trust_remote_code"),
    "template": "--chat_template FILE",
    "reward_adapters": "--reward_model DIR",
    "ref_model": tr("--sync_ref_model true"),
    "lr_scheduler_kwargs": tr("--lr_scheduler_type, --warmup_steps or --warmup_ratio"),
    "auto_find_batch_size": "--per_device_train_batch_size N",
    "gradient_checkpointing_kwargs": tr("--gradient_checkpointing true"),
    "plan_zero_stage": "--deepspeed zero3",
    "plan_offload": "--deepspeed zero3_offload",
    "lora_": tr("--lora_rank, --lora_alpha or --target_modules"),
    "bnb_": tr("--quant_bits 4, --bnb_4bit_quant_type or --bnb_4bit_use_double_quant"),
    "wandb_": tr("a variable such as WANDB_PROJECT=NAME in front of covey"),
    "swanlab_": tr("a variable such as SWANLAB_API_KEY=KEY in front of covey"),
    "fsdp_": "--fsdp_config '{\"NAME\": VALUE}'",
    "hub_": tr("`hf upload ID CHECKPOINT` after the run"),
    "freeze_": tr("--tuner_type full or lora"),
}
"""What to type instead of a refused name, or of a beginning; nothing takes the place of the others."""


def instead_of(name: str) -> str:
    """Return what to type instead of a refused name; empty where there is nothing."""
    beginnings = (beginning for beginning in REFUSED_PREFIXES if name.startswith(beginning))
    return INSTEAD.get(name) or next((INSTEAD.get(beginning, "") for beginning in beginnings), "")
