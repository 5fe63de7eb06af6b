"""DeepSpeed configurations with the settings of the files that ms-swift and transformers bring."""

from __future__ import annotations

from typing import Any

AUTO_BATCH: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
_COMMON: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    **AUTO_BATCH,
}
_LOW: dict[str, Any] = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_STAGE_3: dict[str, Any] = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_QUANTIZED_OFF = {"zero_quantized_weights": False, "zero_quantized_gradients": False}


def _device(name: str) -> dict[str, Any]:
    return {"device": name, "pin_memory": True}


def _file(stage: int, optimizer: str = "none", params: str | None = None, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "offload_optimizer": _device(optimizer)}
    zero |= {} if params is None else {"offload_param": _device(params)}
    return {**_COMMON, "zero_optimization": zero | (_STAGE_3 if stage == 3 else _LOW) | more}


MS_SWIFT: dict[str, dict[str, Any]] = {
    "zero0": {**_COMMON, "zero_optimization": {"stage": 0, **_LOW}},
    "zero1": _file(1),
    "zero2": _file(2),
    "zero3": _file(3, params="none", **_QUANTIZED_OFF),
    "zero2_offload": _file(2, "cpu"),
    "zero3_offload": _file(3, "cpu", "cpu"),
}
"""By the names that `deepspeed` takes."""

_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "zero2_offload": {
        **MS_SWIFT["zero2_offload"],
        "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULER,
    },
    "zero3_offload": {
        **MS_SWIFT["zero3_offload"],
        "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULER,
    },
}
"""The files of transformers' documentation, with its optimizer and its scheduler."""
