"""Options for ways to split a model that covey does not have (tensor, sequence, pipeline and expert
parallelism) and options of Megatron, each with why not and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping

from covey.texts import tr

_SPLITS = tr(
    "covey splits weights, gradients and optimizer state over processes (--fsdp full_shard), but "
    "no layer and no sequence."
)
_LONG = tr("{splits} Long rows need less memory where activations are recomputed.", splits=_SPLITS)
_MEGATRON = tr("An option of Megatron, which covey does not use.")

_SHARD = tr("--fsdp full_shard")
_RECOMPUTE = tr("--gradient_checkpointing true, with --fsdp full_shard for the weights")

PARALLEL: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("sequence_parallel_size", "context_parallel_size", "cp_size", "sp_size", "ulysses_degree"),
        (_LONG, _RECOMPUTE),
    ),
    **dict.fromkeys(("tp_size", "tp_plan", "parallelism_config"), (_SPLITS, _SHARD)),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
         "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "use_distributed_optimizer",
         "num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers",
         "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout", "overlap_grad_reduce",
         "overlap_param_gather"),
        (f"{_MEGATRON} {_SPLITS}", _SHARD),
    ),
    "sequence_parallel": (f"{_MEGATRON} {_LONG}", _RECOMPUTE),
    **dict.fromkeys(
        ("optimizer_cpu_offload", "optimizer_offload_fraction"), (_MEGATRON, tr("--offload_optimizer true"))
    ),
    "recompute_granularity": (_MEGATRON, tr("--gradient_checkpointing selective or true")),
    **dict.fromkeys(
        ("recompute_method", "recompute_num_layers"), (_MEGATRON, tr("--gradient_checkpointing true"))
    ),
    "micro_batch_size": (_MEGATRON, "--per_device_train_batch_size N"),
    "global_batch_size": (
        tr(
"{megatron} A step takes processes x per_device_train_batch_size x "
"gradient_accumulation_steps completions."
, megatron=_MEGATRON),
        "--gradient_accumulation_steps N",
    ),
    "train_iters": (_MEGATRON, "--max_steps N"),
    "mcore_model": (_MEGATRON, tr("--model DIR, with files of transformers")),
    "mcore_adapters": (_MEGATRON, tr("--adapters DIR, with files of peft")),
}  # fmt: skip
"""Names with the reason and what to type instead."""

DEVICES = tr(
    "covey runs one process on each GPU that CUDA_VISIBLE_DEVICES shows, and does not place "
    "modules on devices. It trains on NVIDIA and AMD GPUs and on CPUs, not on Ascend NPUs."
)
"""Why there is no map from modules to devices."""
