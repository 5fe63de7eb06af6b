"""Names of GRPOTrainer, of GRPOConfig and of transformers' TrainingArguments that are no options here: what a
program gives as an object, what changes nothing here, and what is off here as it is there by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from covey.config.moot import Moot
from covey.texts import tr

_EVALUATION = tr("An evaluation samples completions and scores them with the rewards of the run.")
_LINES = tr("covey prints its own lines and a live line; it has no logging levels.")
_TOKENS = tr("metrics.jsonl has the lengths of completions and the seconds of each step.")
_DTYPE = tr("Evaluations use the same dtype as training, --torch_dtype.")
_DDP = tr("covey itself sets up how gradients are summed over the processes.")
_PACKED = tr("Rows are packed, not padded to a multiple.")
_COMPILE = tr("This version does not compile the model.")
_ADAM = tr(
    "The optimizer is AdamW; --adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay configure it."
)
_COMPUTED = tr("transformers computes this itself; it is not a setting.")
_TEXT_ONLY = tr("This version trains on text only.")
_OLD = tr("transformers no longer has this option.")
_CPU = tr("covey uses the GPUs that CUDA_VISIBLE_DEVICES lists, and the CPU if there is none.")


def _each(names: Iterable[str], words: str, *values: str) -> dict[str, Moot]:
    return dict.fromkeys(names, Moot(words, values))


WITHOUT_EFFECT: Mapping[str, Moot] = {
    **_each(
        ("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "label_names",
         "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
         "include_inputs_for_metrics"),
        _EVALUATION,
    ),
    **_each(("log_level", "log_level_replica"), _LINES),
    **_each(("bf16_full_eval", "fp16_full_eval"), _DTYPE),
    **_each(("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ignore_bias_buffers"), _DDP),
    **_each(("pad_to_multiple_of", "length_column_name"), _PACKED),
    **_each(
        ("_n_gpu", "_setup_devices", "__cached__setup_devices", "distributed_state", "mixed_precision",
         "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args"),
        _COMPUTED,
    ),
    **_each(("fp16_opt_level", "fp16_backend", "half_precision_backend", "use_mps_device"), _OLD),
    "log_multimodal": Moot(_TEXT_ONLY),
    "average_tokens_across_devices": Moot(
        tr("The loss is always divided by counts over all processes, as --loss_type says.")
    ),
    "use_cache": Moot(tr("Sampling always keeps keys and values of earlier tokens; training never does.")),
    "torch_empty_cache_steps": Moot(tr("covey itself decides when unused GPU memory is freed.")),
    "log_on_each_node": Moot(tr("Only the first process prints and writes the metrics.")),
    "logging_nan_inf_filter": Moot(tr("A loss that is not finite ends the run, so none is logged.")),
    "include_num_input_tokens_seen": Moot(_TOKENS),
    "include_tokens_per_second": Moot(_TOKENS),
    "skip_memory_metrics": Moot(tr("The metrics include the peak of GPU memory.")),
    "accelerator_config": Moot(tr("covey does not use accelerate.")),
    "restore_callback_states_from_checkpoint": Moot(
        tr("A resumed run continues with all of its saved state.")
    ),
    "enable_jit_checkpoint": Moot(tr("SIGTERM always makes a run save a checkpoint before it ends.")),
    "cast_lm_head_to_fp32": Moot(
        tr("Log-probabilities are always computed in float32 from the products of the output embedding.")
    ),
}  # fmt: skip
"""Names of settings that change no result here, whatever their value."""

OFF: Mapping[str, Moot] = {
    "label_smoothing_factor": Moot(tr("The loss of GRPO has no labels that could be smoothed."), ("0",)),
    "tf32": Moot(
        tr("covey leaves torch's precision of float32 products unchanged, which is without TF32."),
        ("false",),
    ),
    "local_rank": Moot(tr("A launcher says in LOCAL_RANK which process this is."), ("-1",)),
    "eval_delay": Moot(tr("--eval_strategy, --eval_steps and --eval_on_start say when to evaluate."), ("0",)),
    "save_on_each_node": Moot(
        tr("All nodes write into one output_dir, which they share."), ("false",)
    ),
    "full_determinism": Moot(
        tr(
            "Sampling and the order of the data depend only on the seeds, and runs on a CPU repeat exactly. "
            "On a GPU torch may sum in another order; covey has no option that forbids it."
        ),
        ("false",),
    ),
    **_each(("use_cpu", "no_cuda"), _CPU, "false"),
    "train_sampling_strategy": Moot(
        tr("--dataset_shuffle, --data_seed and --curriculum set the order of the prompts."), ("random",)
    ),
    "debug": Moot(tr("The guards check each step for values that are not finite."), ("false",)),
    "do_predict": Moot(tr("`covey eval` samples and scores a data set with a model."), ("false",)),
    "router_aux_loss_coef": Moot(
        tr("The loss has no term that balances the experts of a mixture-of-experts model."), ("0",)
    ),
}  # fmt: skip
"""Names of what covey does not do, with the values under which other trainers do not do it either."""

_ARGS = tr("The fields of GRPOConfig are keyword arguments of covey.train.")
_CALLBACKS = tr(
    "covey calls no code of yours during training except the rewards. metrics.jsonl gets a line at each "
    "step, trackers get the metrics, and --early_stopping_patience ends a run early."
)
_OPTIMIZERS = tr("covey builds the optimizer and the schedule itself, from options.")
_LOSSES = tr("The loss is one of those of --loss_type; covey does not call a function for it.")
_TOKENIZER = tr("The tokenizer is read from the directory of the model.")
_ROWS = tr("covey makes the batches itself; a data set has one row for each prompt.")

OF_PROGRAMS: Mapping[str, str] = {
    "args": _ARGS,
    "callbacks": _CALLBACKS,
    "optimizers": _OPTIMIZERS,
    "optimizer": _OPTIMIZERS,
    "lr_scheduler": _OPTIMIZERS,
    "optimizer_cls_and_kwargs": _OPTIMIZERS,
    "compute_loss_func": _LOSSES,
    "compute_metrics": _EVALUATION,
    "preprocess_logits_for_metrics": _EVALUATION,
    "model_init": tr("covey loads the model that --model names; a program can also give a loaded model."),
    "data_collator": _ROWS,
    "processing_class": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "quantization_config": tr("Quantization is set by options, in the group Quantization of `--help`."),
    "peft_config": tr("Adapters are set by options, in the group Adapters of `--help`."),
    "optim_args": _ADAM,
    "optim_target_modules": _ADAM,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "liger_kernel_config": tr("covey uses the norms and gated layers of liger-kernel, or none of it."),
    "neftune_noise_alpha": tr(
        "Noise in the embeddings would give one token different probabilities in sampling and in training."
    ),
    "cache_implementation": tr("Each engine of covey has its own cache for keys and values."),
    "log_completions_hub_repo": tr("This version does not upload anything."),
    "datasets": tr("Give one or more data sets as --dataset, and their shares as --interleave_prob."),
    "test_split_size": tr("--split_dataset_ratio holds a share of the rows out for evaluation."),
}
"""Names that are refused with any value but null, each with what covey does."""

OF_PROGRAMS_INSTEAD: Mapping[str, str] = {
    "args": tr("covey.train(**vars(args), model=..., dataset=..., reward_funcs=...)"),
    "callbacks": tr("the file metrics.jsonl, --report_to or --early_stopping_patience N"),
    **dict.fromkeys(
        ("optimizers", "optimizer", "optimizer_cls_and_kwargs"),
        tr("--optim, --learning_rate and --lr_scheduler_type"),
    ),
    "lr_scheduler": tr("--lr_scheduler_type, --warmup_steps or --warmup_ratio"),
    "compute_loss_func": "--loss_type",
    "compute_metrics": tr("a reward; with weight 0 in --reward_weights it is only measured"),
    "preprocess_logits_for_metrics": tr("a reward; with weight 0 in --reward_weights it is only measured"),
    "model_init": "--model",
    "processing_class": tr("--model DIR, with the tokenizer in DIR"),
    "tokenizer": tr("--model DIR, with the tokenizer in DIR"),
    "quantization_config": tr("--quant_bits 4 or 8, with --bnb_4bit_quant_type"),
    "peft_config": tr("--tuner_type lora, --lora_rank, --lora_alpha and --target_modules"),
    "optim_args": "--adam_beta1, --adam_beta2",
    "optim_target_modules": "--tuner_type lora --target_modules",
    "liger_kernel_config": "--use_liger_kernel true",
    "datasets": "--dataset FILE_OR_ID ...",
    "test_split_size": "--split_dataset_ratio X",
}
"""What to type instead of them, where there is something."""

OFF_INSTEAD: Mapping[str, str] = {
    "eval_delay": "--eval_steps N",
    "local_rank": tr("--nproc_per_node N, or torchrun"),
    **dict.fromkeys(("use_cpu", "no_cuda"), tr("CUDA_VISIBLE_DEVICES= in front of covey")),
    "train_sampling_strategy": "--dataset_shuffle false",
    "do_predict": "`covey eval`",
    "debug": tr("--guards true, the default"),
}
"""The same for names of OFF."""
