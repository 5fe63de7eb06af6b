"""Names of ms-swift for other methods, tuners and models, which this version refuses with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from covey.texts import tr

_METHODS = tr("This is an option of another training method of ms-swift; covey trains with GRPO.")
_TUNERS = tr("This is an option of another tuner; covey trains all weights or LoRA adapters.")
_OPTIMIZERS = tr("The optimizer is AdamW, with one learning rate for both matrices of an adapter.")
_TASKS = tr("This is an option for classifiers, embeddings or agents; covey trains a causal language model.")
_MODEL = tr("The model is loaded as its config.json says.")
_IMAGES = tr("covey reads no boxes in images.")
_VISION = tr(
    "--gradient_checkpointing is for the vision tower, too; one that is frozen keeps no activations."
)
_DATA = tr("covey reads the data before the run and renames columns only with --columns.")
_TEMPLATE = tr("covey uses the chat template of the tokenizer; --chat_template FILE replaces it.")
_EVALSCOPE = tr("covey evaluates on the prompts of --val_dataset; it does not run benchmarks of EvalScope.")
_ONE_TURN = tr("Each completion is a single answer, and all of its tokens are trained.")
_RESUME = tr("The configuration of a run is its config.yaml; nothing else is read.")
_FILES = tr("Checkpoints are always written as safetensors; there is no option for their files.")
_VLLM_WEIGHTS = tr("covey itself decides how weights are sent to vLLM.")
_METRICS = tr("covey has its own metrics, among them those of how sampled and trained probabilities differ.")
_SCORES = tr("This version has no option that changes advantages token by token.")
_NEXT = tr("Engines of covey sample text without a grammar.")


def _each(names: Iterable[str], words: str) -> dict[str, str]:
    return dict.fromkeys(names, words)


OTHER_METHODS: Mapping[str, str] = {
    **_each(
        ("num_ppo_epochs", "whiten_rewards", "cliprange", "cliprange_value", "vf_coef", "gamma",
         "lam", "num_mini_batches", "local_rollout_forward_batch_size", "num_sample_generations",
         "missing_eos_penalty", "label_smoothing", "rpo_alpha", "ld_alpha", "discopop_tau", "loss_weights",
         "cpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight", "lmbda", "seq_kd",
         "center_rewards_coefficient", "sft_alpha", "gkd_logits_topk", "offload_teacher_model",
         "enable_dft_loss", "enable_channel_loss"),
        _METHODS,
    ),
    **_each(("advantage_reweight",), _SCORES),
    **_each(
        ("trainable_parameters", "trainable_parameters_regex", "target_regex", "target_parameters",
         "init_weights", "use_swift_lora", "tuner_backend", "use_galore", "adapter_act", "adapter_length"),
        _TUNERS,
    ),
    **_each(("lorap_lr_ratio",), _OPTIMIZERS),
    **_each(
        ("num_labels", "problem_type", "agent_template", "mrl_dims", "use_logits_to_keep", "stream",
         "logprobs", "top_logprobs"),
        _TASKS,
    ),
    **_each(
        ("experts_impl", "new_special_tokens", "rope_scaling", "max_memory", "max_model_len",
         "local_repo_path", "init_strategy", "model_kwargs", "custom_register_path", "hqq_axis",
         "enable_npu_model_patch", "ref_model_type", "ref_model_revision"),
        _MODEL,
    ),
    **_each(("norm_bbox",), _IMAGES),
    **_each(("vit_gradient_checkpointing",), _VISION),
    **_each(
        ("cached_dataset", "cached_val_dataset", "shuffle_buffer_size", "download_mode", "strict",
         "disable_auto_column_mapping", "model_name", "model_author", "packing_length", "packing_num_proc",
         "packing_strategy", "train_dataloader_shuffle"),
        _DATA,
    ),
    **_each(
        ("use_chat_template", "padding_side", "template_backend", "response_prefix", "preserve_thinking",
         "add_non_thinking_prefix", "disable_ignore_empty_think"),
        _TEMPLATE,
    ),
    "is_binary_loss_scale": _ONE_TURN,
    **_each(
        ("eval_metric", "eval_use_evalscope", "eval_dataset_args", "eval_limit", "eval_generation_config",
         "extra_eval_args"),
        _EVALSCOPE,
    ),
    **_each(("load_args", "load_data_args"), _RESUME),
    **_each(("safe_serialization", "max_shard_size", "use_flash_ckpt"), _FILES),
    **_each(("zero_hpz_partition_size", "deepspeed_autotp_size"), tr(
        "covey itself shards where --deepspeed names a stage, and has no such setting."
    )),
    "enable_flattened_weight_sync": _VLLM_WEIGHTS,
    "structured_outputs_regex": _NEXT,
    **_each(("acc_strategy", "log_rollout_offpolicy_metrics"), _METRICS),
}  # fmt: skip
"""Names, each with the reason."""

OTHER_PREFIXES: Mapping[str, str] = {
    **_each(
        ("adalora_", "boft_", "vera_", "reft_", "fourier_", "llamapro_", "lisa_", "galore_"), _TUNERS
    ),
    **_each(("rlsd_", "sdar_"), _SCORES),
    "decision_": _TASKS,
}  # fmt: skip
"""Beginnings of names, each with the reason."""
