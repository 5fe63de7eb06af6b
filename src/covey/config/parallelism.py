"""Options for ways to split a model that covey does not have (tensor, sequence, pipeline and expert
parallelism) and options of Megatron, each with why not and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping

from covey.texts import tr

_SPLITS = tr(
    "covey can shard weights, gradients and optimizer state over processes (--fsdp full_shard). It has no "
    "tensor, pipeline or sequence parallelism."
)
_LONG = tr("{splits} Activation recomputation reduces the memory of long rows.", splits=_SPLITS)
_MEGATRON = tr("This is an option of Megatron, and covey does not use Megatron.")

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
"{megatron} One optimizer step uses processes x per_device_train_batch_size x gradient_accumulation_steps "
"completions."
, megatron=_MEGATRON),
        "--gradient_accumulation_steps N",
    ),
    "train_iters": (_MEGATRON, "--max_steps N"),
    "mcore_model": (_MEGATRON, tr("--model DIR, with files of transformers")),
    "mcore_adapters": (_MEGATRON, tr("--adapters DIR, with files of peft")),
}  # fmt: skip
"""Names with the reason and what to type instead."""

DEVICES = tr(
    "covey runs one process on each GPU in CUDA_VISIBLE_DEVICES and does not place modules on devices. It "
    "trains on NVIDIA and AMD GPUs and on CPUs, but not on Ascend NPUs."
)
"""Why there is no map from modules to devices."""
