"""Names of TRL and ms-swift that are no options here: those that this version refuses, with the reason, and
those that say what covey does anyway."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.foreign_algorithms import OTHER_METHODS, OTHER_PREFIXES
from covey.config.foreign_trainer import (
    OF_PROGRAMS,
    OF_PROGRAMS_INSTEAD,
    OFF,
    OFF_INSTEAD,
    WITHOUT_EFFECT,
)
from covey.config.moot import Moot
from covey.config.parallelism import DEVICES, PARALLEL
from covey.texts import tr

_PACKED = tr("Rows are packed if the model supports it; the results are the same either way.")
_TUNER = tr("The options for adapters are in the group Adapters of `covey train --help`.")
_ENGINES = tr(
    "covey samples with its own engine (--engine native), with transformers' generate, or with vLLM."
)
_VLLM = tr(
    "covey has no option for this; give arguments of vLLM's class LLM as JSON in --vllm_engine_kwargs."
)
_ONE_EACH = tr(
    "When vLLM runs on the training GPUs (--vllm_mode colocate), each process has one engine, or "
    "--vllm_tensor_parallel_size processes share one."
)
_DRAWN = tr("Beam search does not sample from the policy, so covey cannot train on its completions.")
_SAMPLING = tr("Each sampling setting has an option of its own in covey.")
_PENALTY = tr(
    "With a penalty the sampler's probabilities are not the model's, so that the loss would train on wrong "
    "ratios. A reward against repetition teaches the model itself: --reward_funcs repetition."
)
_ROLLOUTS = tr("Completions are written to rollouts/ in output_dir; --rollout_log sets which rollouts.")
_SAVING = tr("Checkpoints are saved every --save_steps optimizer steps and at the end.")
_SAVING_LITTLE = tr(
    "{saving} With a --save_steps larger than the number of steps only the last one is saved; covey always "
    "saves that one, because it holds the trained model.",
    saving=_SAVING,
)
_REF = tr(
    "The reference model of the KL term is the initial model; with --sync_ref_model it follows the policy."
)
_QUANT = tr("The options for quantization are in the group Quantization of `covey train --help`.")
_SPLIT = tr("Subset and split are part of the data set's name: --dataset ID:SUBSET@SPLIT.")
_OURS = tr(
    "Trackers read this setting from their own environment variables; covey has only --report_to and "
    "--run_name."
)
_NO_LOADERS = tr("Prompts are read before the run starts, so there is no data loader to configure.")
_GROUPS = tr("Each process both samples and trains; covey does not divide devices into groups.")
_EVERY_COLUMN = tr("Every column of the data set is passed to the rewards.")
_UPLOAD = tr("This version does not upload anything.")
_PLANNED = tr("`covey plan` reads how the model is sharded and offloaded from the options of the run.")

MOOT: Mapping[str, Moot] = {
    **WITHOUT_EFFECT,
    **OFF,
    "dataloader_num_workers": Moot(_NO_LOADERS),
    "dataloader_pin_memory": Moot(_NO_LOADERS),
    "dataloader_prefetch_factor": Moot(_NO_LOADERS),
    "dataloader_persistent_workers": Moot(_NO_LOADERS),
    "dataset_num_proc": Moot(_NO_LOADERS),
    "load_from_cache_file": Moot(_NO_LOADERS),
    "lazy_tokenize": Moot(_NO_LOADERS),
    "remove_unused_columns": Moot(_EVERY_COLUMN, ("false",)),
    "dataloader_drop_last": Moot(tr("An epoch always consists of whole rollouts.")),
    "dataloader_multiprocessing_context": Moot(_NO_LOADERS),
    "dataloader_in_order": Moot(_NO_LOADERS),
    "per_device_eval_batch_size": Moot(tr("covey samples as many completions at a time as fit in memory.")),
    "do_train": Moot(tr("`covey train` always trains.")),
    "do_eval": Moot(tr("--eval_strategy says when to evaluate.")),
    "logging_first_step": Moot(tr("Every step is logged, including the first one.")),
    "logging_dir": Moot(tr("The files of TensorBoard are in output_dir/runs.")),
    "logging_strategy": Moot(tr("covey logs every --logging_steps steps."), ("steps",)),
    "save_strategy": Moot(_SAVING_LITTLE, ("steps", "false")),
    "save_safetensors": Moot(tr("Weights are always saved as safetensors."), ("true",)),
    "create_checkpoint_symlink": Moot(_SAVING, ("false",)),
    "add_version": Moot(tr("--output_dir is used as given; without it, the runs in runs/ are numbered.")),
    "log_entropy": Moot(tr("The metrics always include the entropy.")),
    "gc_collect_after_offload": Moot(tr("This is always done when something is offloaded.")),
    "model_type": Moot(tr("The model type is read from the model's config.json.")),
    "reward_model_type": Moot(tr("The model type is read from the reward model's config.json.")),
    "reward_processing_classes": Moot(
        tr("The tokenizer of a reward model is read from the reward model's directory.")
    ),
    "reward_model_plugin": Moot(
        tr(
            "The reward of a reward model is its one logit. For a model that writes a verdict use "
            "--reward_funcs judge; for anything else write your own function, FILE.py:NAME."
        ),
        ("default",),
    ),
    "task_type": Moot(tr("`covey train` runs GRPO on a causal language model."), ("causal_lm",)),
    "padding_free": Moot(_PACKED),
    "packing": Moot(_PACKED),
    "use_liger_loss": Moot(tr("covey never computes the logits of a whole batch at once.")),
    "ddp_find_unused_parameters": Moot(tr("Every trained weight takes part in every forward pass.")),
    "ddp_backend": Moot(tr("covey uses NCCL on GPUs and gloo otherwise."), ("nccl", "gloo")),
    "vllm_server_pass_dataset": Moot(tr("A scheduler is given every column of the data set.")),
    "use_ray": Moot(
        tr("torchrun starts the processes, unless --launcher ray is given."),
        ("false",),
        {"true": ("launcher", "ray")},
    ),
    "ddp_timeout": Moot(tr("The default timeouts of torch.distributed are used.")),
    "disable_tqdm": Moot(tr("covey prints a line for each step, or about 20 lines in a long run.")),
    "check_model": Moot(tr("The files of a model are always checked before they are loaded.")),
    "ds3_gather_for_generation": Moot(tr("covey itself gathers the weights for each rollout.")),
    "fp16": Moot(
        tr("covey cannot train in float16; --torch_dtype sets the dtype of the forward pass."), ("false",)
    ),
    "load_in_4bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "4")}),
    "load_in_8bit": Moot(_QUANT, ("false",), {"true": ("quant_bits", "8")}),
    "repetition_penalty": Moot(_PENALTY, ("1", "1.0")),
    "presence_penalty": Moot(_PENALTY, ("0", "0.0")),
    "frequency_penalty": Moot(_PENALTY, ("0", "0.0")),
    "num_beams": Moot(_DRAWN, ("1",)),
    "do_sample": Moot(tr("Completions are always sampled; --temperature sets how."), ("true",)),
    "multi_objective_aggregation": Moot(
        tr("Rewards are summed with --reward_weights before they are compared."),
        ("sum_then_normalize",),
        {"normalize_then_sum": ("scale_rewards", "gdpo")},
    ),
    "vllm_importance_sampling_correction": Moot(
        tr("Completions that are sampled with the weights in training need no correction."),
        ("false",),
        {"true": ("vllm_importance_sampling_mode", "sequence_mask")},
    ),
    "push_to_hub": Moot(_UPLOAD, ("false",)),
    "hub_strategy": Moot(_UPLOAD, ("every_save",)),
    "hub_token": Moot(_UPLOAD),
    "hub_always_push": Moot(_UPLOAD, ("false",)),
    "hub_private_repo": Moot(_UPLOAD, ("false",)),
    "use_transformers_continuous_batching": Moot(_ENGINES, ("false",)),
    "use_transformers_paged": Moot(_ENGINES, ("false",)),
    "vllm_model_impl": Moot(_VLLM, ("vllm",)),
    "dataset_train_split": Moot(_SPLIT, ("train",)),
    "dataset_test_split": Moot(
        tr("The split for evaluation is part of --val_dataset ID:SUBSET@SPLIT."), ("test",)
    ),
    "log_unique_prompts": Moot(_ROLLOUTS),
    "num_completions_to_print": Moot(_ROLLOUTS),
    "wandb_log_unique_prompts": Moot(_ROLLOUTS),
    "project": Moot(_OURS, ("huggingface",)),
    "lora_task_type": Moot(tr("`covey train` runs GRPO on a causal language model."), ("causal_lm",)),
    "lora_bias": Moot(_TUNER, ("none",)),
    "ignore_data_skip": Moot(
        tr("A resumed run always continues at the position in the data where it stopped."), ("false",)
    ),
    "auto_find_batch_size": Moot(
        tr(
            "covey uses the batch size that you give; `covey plan` lists other ways to split it that "
            "need less memory."
        ),
        ("false",),
    ),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        Moot(
            tr("covey supports only --gradient_checkpointing true or selective, without further settings."),
            ('{"use_reentrant": false}', '{"use_reentrant": true}'),
        ),
    ),
    "group_by_length": Moot(tr("The rows of a forward pass are packed."), ("false",)),
    "torch_compile": Moot(tr("This version does not compile the model."), ("false",)),
}
"""Names that say what covey does anyway: accepted and said once. Other values than those are refused."""

REFUSED: Mapping[str, str] = {
    **OF_PROGRAMS,
    **OTHER_METHODS,
    "merge_lora": tr("`covey export CHECKPOINT --merge` merges an adapter into its model."),
    "num_infer_workers": _ONE_EACH,
    "vllm_device": tr(
        "{one_each} A separate server uses the GPUs that its CUDA_VISIBLE_DEVICES lists.", one_each=_ONE_EACH
    ),
    "use_lmdeploy": tr("{engines} ms-swift no longer supports LMDeploy either.", engines=_ENGINES),
    "transformers_continuous_batching_config": _ENGINES,
    "device_map": DEVICES,
    **{name: words for name, (words, _) in PARALLEL.items()},
    "device_groups": _GROUPS,
    "colocate_groups": _GROUPS,
    "generation_kwargs": _SAMPLING,
    "min_pixels": tr("The smallest size of images is that of the model's preprocessor_config.json."),
    "wandb_project": _OURS,
    "eval_dataset": tr("Give the data sets for evaluation as --val_dataset FILE ..."),
    "resume_only_model": (
        tr("To start from saved weights, give them as --model, or as --adapters if they are an adapter.")
    ),
    "dataset_config": _SPLIT,
    "custom_dataset_info": tr("Give a data set as its file or hub id; rename its columns with --columns."),
    "model_init_kwargs": tr("Use the options --torch_dtype, --model_revision and --trust_remote_code."),
    "template": tr("covey uses the chat template of the tokenizer; --chat_template FILE replaces it."),
    "reward_adapters": (
        tr(
            "Merge the adapter into its reward model first: with `covey export` for policies, with peft's "
            "merge_and_unload for classifiers. Then give the resulting directory as --reward_model DIR."
        )
    ),
    "reward_template": tr("A reward model uses the chat template in its own directory."),
    "context_manager": tr(
        "ms-swift has removed it: a subclass of GYMScheduler that changes infer_request.messages in step(), "
        "put into multi_turns, does the same."
    ),
    "ref_model": _REF,
    "ignore_args_error": tr("An option without effect is always refused."),
    "stopping_strategy": tr(
        "Mixing stops when the first source is used up; without --interleave_prob all sources are used up."
    ),
    "plan_zero_stage": _PLANNED,
    "plan_offload": _PLANNED,
    "ladder": tr("`covey plan` says by itself which changes fit if a run is too large."),
    "val_dataset_shuffle": tr("All prompts of --val_dataset are evaluated, so their order does not matter."),
}
"""Names that this version has nothing for, each with what it does instead."""

REFUSED_PREFIXES: Mapping[str, str] = {
    "model_init_kwargs.": tr("covey loads a model with arguments of its own."),
    **OTHER_PREFIXES,
    "vllm_": _VLLM,
    "lora_": _TUNER,
    "bnb_": _QUANT,
    "swanlab_": _OURS,
    "trackio_": _OURS,
    "wandb_": _OURS,
    "fsdp_": tr("Give the settings of FSDP as JSON in --fsdp_config."),
    "hub_": _UPLOAD,
    "teacher_": tr("This version cannot distill from a teacher model."),
    "chord_": tr("This version cannot add a supervised loss."),
    "freeze_": tr(
        "--tuner_type sets what is trained; of a vision language model also --freeze_vit, --freeze_aligner "
        "and --freeze_llm."
    ),
    "dataloader_": _NO_LOADERS,
}
"""Beginnings of names that come in families."""

INSTEAD: Mapping[str, str] = {
    **OFF_INSTEAD,
    **OF_PROGRAMS_INSTEAD,
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
    "generation_kwargs": tr("--temperature X, --top_p X, --top_k N or --min_p X"),
    "wandb_project": tr("WANDB_PROJECT=NAME in front of covey"),
    "eval_dataset": "--val_dataset FILE",
    "resume_only_model": tr("--model CHECKPOINT, or --adapters CHECKPOINT"),
    "save_strategy": "--save_steps N",
    "logging_strategy": "--logging_steps N",
    "activation_checkpointing_kwargs": tr("--gradient_checkpointing true"),
    "dataset_config": "--dataset ID:SUBSET",
    "dataset_train_split": "--dataset ID@SPLIT",
    "dataset_test_split": "--val_dataset ID@SPLIT",
    "custom_dataset_info": tr('--dataset FILE --columns \'{"THEIRS": "OURS"}\''),
    "model_init_kwargs": tr("--torch_dtype, --model_revision or --trust_remote_code"),
    "model_init_kwargs.": tr("--torch_dtype, --model_revision, --attn_impl or --trust_remote_code"),
    "template": "--chat_template FILE",
    "reward_adapters": "--reward_model DIR",
    "ref_model": tr("--sync_ref_model true"),
    "auto_find_batch_size": "--per_device_train_batch_size N",
    "gradient_checkpointing_kwargs": tr("--gradient_checkpointing true"),
    "plan_zero_stage": "--deepspeed zero3",
    "plan_offload": "--deepspeed zero3_offload",
    "lora_": tr("--lora_rank, --lora_alpha or --target_modules"),
    "bnb_": tr("--quant_bits 4, --bnb_4bit_quant_type or --bnb_4bit_use_double_quant"),
    "project": tr("a variable such as WANDB_PROJECT=NAME in front of covey"),
    "trackio_": tr("a variable such as TRACKIO_SPACE_ID=ID in front of covey"),
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
