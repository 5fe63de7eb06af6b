"""How the model lies on the devices; what is not built yet `covey plan` forecasts, and `covey train` refuses
by name."""

from __future__ import annotations

from typing import Any

from covey.options.declare import Options, option

_IN_TURNS = "`covey train` samples a rollout and then trains on it."


class DeviceOptions(Options):
    """Devices: how the model lies on them."""

    deepspeed: str | None = option(
        None,
        "DeepSpeed's ZeRO: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, or a JSON file of "
        "DeepSpeed. zero0 is a whole model in each process, without DeepSpeed.",
        trl="given to accelerate",
        swift="not set",
        resume="split",
    )
    fsdp: str | None = option(
        None,
        "PyTorch's sharding (FSDP2): full_shard (or fsdp2) splits weights, gradients and optimizer state "
        "over all processes, hybrid_shard over those of a node, shard_grad_op keeps gathered weights from "
        "forward to backward; off splits nothing. transformers' words auto_wrap and offload are taken too.",
        trl="not set",
        swift="not set",
        resume="split",
    )
    fsdp_offload: bool = option(
        False,
        "Whether shards are kept in CPU memory and copied to the GPU a layer at a time.",
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
        "Keep AdamW's moments and the float32 masters in CPU memory; each step copies them to the GPU, some "
        "layers at a time. The results are the same.",
        swift="false",
        resume="free",
    )
    offload_model: bool = option(
        False,
        "During rollouts, move to CPU memory what they do not need: masters, moments, the reference and the "
        "shards of FSDP. The trained weights stay, since the native engine samples with them.",
        swift="false",
        resume="free",
    )
    offload_reference: bool = option(
        False,
        "Keep the weights of the KL term's reference in CPU memory, except while its log-probabilities are "
        "computed.",
        resume="free",
    )
    move_model_batches: int | None = option(
        None,
        "With offload_optimizer, how many groups of layers each step copies to the GPU, one after the other: "
        "more groups take less memory. Not set: one group a layer.",
        ge=1,
        why="It is a number of groups of layers.",
        swift="not set",
        resume="free",
    )
    async_generate: bool = option(
        False,
        "Whether vLLM samples while the model trains; it then has GPUs of its own.",
        swift="false",
        not_built=_IN_TURNS,
    )
