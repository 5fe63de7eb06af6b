"""How the model lies on the devices."""

from __future__ import annotations

from typing import Any

from covey.options.declare import Options, PathKind, option


class DeviceOptions(Options):
    """Devices: how the model is placed on them."""

    deepspeed: str | None = option(
        None,
        "DeepSpeed's ZeRO: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, or a JSON file of "
        "DeepSpeed. zero0: each process holds the whole model, and DeepSpeed is not used.",
        trl="given to accelerate",
        swift="not set",
        resume="split",
        path=PathKind("E217", or_text=True),
    )
    fsdp: str | None = option(
        None,
        "PyTorch's sharding (FSDP2). full_shard (or fsdp2): weights, gradients and optimizer state are "
        "split over all processes; hybrid_shard: over the processes of one node; shard_grad_op: gathered "
        "weights are kept from the forward to the backward pass; off: nothing is split. The values "
        "auto_wrap and offload of transformers are accepted too.",
        trl="not set",
        swift="not set",
        resume="split",
    )
    fsdp_offload: bool = option(
        False,
        "Keep shards in CPU memory and copy them to the GPU one layer at a time.",
        trl="in fsdp_config",
        swift="in fsdp_config",
        resume="split",
    )
    fsdp_config: dict[str, Any] | None = option(
        None,
        "FSDP settings of transformers or accelerate, as JSON. Settings for what covey always does have no "
        "effect.",
        trl="not set",
        swift="not set",
        resume="split",
    )
    offload_optimizer: bool = option(
        False,
        "Keep AdamW's moments and the float32 master weights in CPU memory; each step copies them to the "
        "GPU a few layers at a time. Results do not change.",
        swift="false",
        resume="free",
    )
    offload_model: bool = option(
        False,
        "During rollouts, move to CPU memory what sampling does not need: float32 master weights, AdamW's "
        "moments, the reference model and FSDP shards. The trained weights stay on the GPU, because the "
        "native engine samples with them.",
        swift="false",
        resume="free",
    )
    offload_reference: bool = option(
        False,
        "Keep the weights of the reference model in CPU memory, except while its log-probabilities are "
        "computed.",
        resume="free",
    )
    move_model_batches: int | None = option(
        None,
        "With offload_optimizer: the number of groups of layers that a step copies to the GPU, one after "
        "the other. More groups need less memory. Not set: one group per layer.",
        ge=1,
        why="It is a number of groups of layers.",
        swift="not set",
        resume="free",
    )
