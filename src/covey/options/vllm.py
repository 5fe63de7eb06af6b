"""vLLM in the place of covey's own engine."""

from __future__ import annotations

from typing import Any, Literal

from covey.options.declare import Options, only_with, option

_WITH_VLLM = only_with("use_vllm", True)
# A server has options of its own for these: `covey rollout --engine vllm`.
_IN_PROCESS = only_with("vllm_mode", "colocate")

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks of adapters that vLLM may be told."""


class VllmOptions(Options):
    """vLLM: sampling with it in the place of covey's own engine."""

    use_vllm: bool = option(
        ...,
        "Whether vLLM samples.",
        rule="true where another option of vLLM is typed, else false",
        trl="false",
        swift="false",
    )
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate",
        "Whether vLLM runs in the training processes, on the same devices, or in servers of its own.",
        trl="colocate",
        swift="colocate",
        read_if=_WITH_VLLM,
    )
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "Share of each GPU's memory that vLLM takes, weights and cache. Not set: what its weights and the "
        "completions of a rollout take, as far as the training leaves it. On a CPU it is not read.",
        gt=0,
        lt=1,
        why="It is a share of each GPU's memory, between 0 and 1: training needs what vLLM leaves.",
        trl="0.3",
        swift="0.9",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_max_model_len: int | None = option(
        None,
        "Tokens of the longest prompt with its completion that vLLM holds. Not set: as many as the run has.",
        ge=2,
        why="A prompt and its completion have at least one token each.",
        trl="not set",
        swift="not set",
        names=("vllm_max_model_length",),
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_max_num_seqs: int | None = option(
        None,
        "Completions that vLLM samples side by side. Not set: those of a rollout, at most 256.",
        ge=1,
        why="vLLM samples one completion at least.",
        swift="not set",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_tensor_parallel_size: int = option(
        1,
        "GPUs that one vLLM spans; in a server.",
        ge=1,
        why="It is a number of GPUs.",
        trl="1",
        swift="1",
        names=("tensor_parallel_size",),
        resume="free",
        read_if=_WITH_VLLM,
    )
    vllm_data_parallel_size: int = option(
        1,
        "Number of vLLMs side by side: that of the processes with vllm_mode colocate, else that of the "
        "servers. Another number is refused.",
        ge=1,
        why="One vLLM samples at least.",
        swift="1",
        resume="free",
        read_if=_WITH_VLLM,
    )
    vllm_enforce_eager: bool = option(
        False,
        "Whether vLLM runs without compiled graphs: it starts in less time and samples more slowly.",
        swift="false",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_prefix_caching: bool = option(
        True,
        "Whether vLLM computes a prompt once for its completions. The cache is emptied at each publish.",
        swift="true",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_sleep_mode: bool = option(
        ...,
        "Whether vLLM gives its memory back while the model trains; on GPUs.",
        rule="true where sleep_level is above 0",
        trl="false",
        resume="free",
        read_if=_IN_PROCESS,
    )
    sleep_level: int = option(
        0,
        "vLLM's sleep level while the model trains: 0 does not sleep, 1 moves its weights to CPU memory, 2 "
        "drops them, and they are published again.",
        ge=0,
        le=2,
        why="vLLM has the levels 0, 1 and 2.",
        swift="0",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_lora: bool = option(
        ...,
        "Whether vLLM applies the adapter itself: the base is sent once, and then the adapter alone. If "
        "false, the adapter is added to the weights, and all of them are sent each time.",
        rule="true where an adapter is trained that vLLM can apply: no use_dora, no modules_to_save, and a "
        "lora_rank of at most 512",
        swift="false",
        resume="free",
        read_if=_WITH_VLLM,
    )
    vllm_max_lora_rank: int | None = option(
        None,
        "Highest rank of an adapter that vLLM makes room for. Not set: lora_rank.",
        ge=1,
        le=512,
        why="vLLM takes LoRA adapters of rank 1 to 512.",
        swift="16",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_engine_kwargs: dict[str, Any] | None = option(
        None,
        "Further arguments of vLLM's class LLM, as JSON.",
        swift="not set",
        resume="free",
        read_if=_IN_PROCESS,
    )
