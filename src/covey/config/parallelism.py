"""Names of ways to split a model that covey has not: tensor, sequence, pipeline and expert parallelism, and
Megatron's options for them, each with why not and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping

_SPLITS = (
    "covey splits weights, gradients and optimizer state over the GPUs (--fsdp full_shard), and a batch over "
    "ranks; it splits no layer and no sequence."
)
_LONG = f"{_SPLITS} A long row takes less with activations computed again; the head never holds all logits."
_MEGATRON = f"An option of Megatron, which covey does not use. {_SPLITS}"

_SHARD = "--fsdp full_shard"
_OFFLOAD = "--fsdp full_shard --fsdp_offload true"
_RECOMPUTE = "--gradient_checkpointing true, with --fsdp full_shard for the weights"

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
        (_MEGATRON, _SHARD),
    ),
    "sequence_parallel": (_MEGATRON, _RECOMPUTE),
    "optimizer_cpu_offload": (_MEGATRON, _OFFLOAD),
    "optimizer_offload_fraction": (_MEGATRON, _OFFLOAD),
    "recompute_granularity": (_MEGATRON, "--gradient_checkpointing selective or true"),
    "recompute_method": (_MEGATRON, "--gradient_checkpointing true"),
    "recompute_num_layers": (_MEGATRON, "--gradient_checkpointing true"),
    "micro_batch_size": (_MEGATRON, "--per_device_train_batch_size N"),
    "global_batch_size": (
        f"{_MEGATRON} A step takes processes x per_device_train_batch_size x gradient_accumulation_steps "
        "completions.",
        "--gradient_accumulation_steps N",
    ),
    "train_iters": (_MEGATRON, "--max_steps N"),
    "mcore_model": (_MEGATRON, "--model DIR, of transformers' files"),
    "mcore_adapters": (_MEGATRON, "--adapters DIR, of peft's files"),
}  # fmt: skip
"""Names with the reason and what to type instead."""

DEVICES = (
    "covey puts one process on each GPU that CUDA_VISIBLE_DEVICES leaves, and maps no modules to devices. It "
    "trains on GPUs that torch calls cuda and on CPUs, not on Ascend NPUs."
)
"""What takes the place of a map from modules to devices."""
