"""vLLM instead of the built-in engine."""

from __future__ import annotations

from typing import Any, Literal

from covey.options.declare import Options, only_with, option

_WITH_VLLM = only_with("use_vllm", True)
# A server has options of its own for these: `covey rollout --engine vllm`.
_IN_PROCESS = only_with("vllm_mode", "colocate")

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks of adapters that vLLM may be told."""


class VllmOptions(Options):
    """vLLM: sample with vLLM instead of the built-in engine."""

    use_vllm: bool = option(
        ...,
        "Sample with vLLM.",
        rule="true if another option of vLLM is given, else false",
        trl="false",
        swift="false",
    )
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate",
        "Where vLLM runs. colocate: in the training processes, on the same devices; server: in separate "
        "servers.",
        trl="colocate",
        swift="colocate",
        read_if=_WITH_VLLM,
    )
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "Share of each GPU's memory for vLLM's weights and cache. Not set: what its weights and the "
        "completions of a rollout need, as far as training leaves room for it. Ignored on a CPU.",
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
        "Largest number of tokens of a prompt and its completion in vLLM. Not set: as many as the run needs.",
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
        "Number of completions that vLLM samples at a time. Not set: those of a rollout, at most 256.",
        ge=1,
        why="vLLM samples at least one completion at a time.",
        swift="not set",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_tensor_parallel_size: int = option(
        1,
        "Number of GPUs that one vLLM engine uses. With vllm_mode colocate so many training processes, one "
        "after the other, are one engine; it has to divide the processes of a machine.",
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
        "Number of vLLM engines: with vllm_mode colocate that of the processes divided by "
        "vllm_tensor_parallel_size, else that of the servers. Other numbers are refused.",
        ge=1,
        why="At least one vLLM engine has to sample.",
        swift="1",
        resume="free",
        read_if=_WITH_VLLM,
    )
    vllm_enforce_eager: bool = option(
        False,
        "Run vLLM without compiled graphs: it starts faster and samples more slowly.",
        swift="false",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_prefix_caching: bool = option(
        True,
        "Let vLLM compute a prompt once for all of its completions. The cache is cleared at each publish.",
        swift="true",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_sleep_mode: bool = option(
        ...,
        "Let vLLM free its memory while the model trains; only on GPUs.",
        rule="true if sleep_level is above 0",
        trl="false",
        resume="free",
        read_if=_IN_PROCESS,
    )
    sleep_level: int = option(
        0,
        "Sleep level of vLLM while the model trains. 0: no sleep; 1: its weights move to CPU memory; 2: "
        "its weights are dropped and published again.",
        ge=0,
        le=2,
        why="vLLM has the levels 0, 1 and 2.",
        swift="0",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_enable_lora: bool = option(
        ...,
        "Let vLLM apply the adapter: the base model is sent once, and after that only the adapter. false: "
        "the adapter is merged into the weights, and all weights are sent each time.",
        rule="true if vLLM can apply the trained adapter: no use_dora, no modules_to_save, and a "
        "lora_rank of at most 512",
        swift="false",
        resume="free",
        read_if=_WITH_VLLM,
    )
    vllm_max_lora_rank: int | None = option(
        None,
        "Highest rank of an adapter for which vLLM reserves memory. Not set: lora_rank.",
        ge=1,
        le=512,
        why="vLLM takes LoRA adapters of rank 1 to 512.",
        swift="16",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_limit_mm_per_prompt: dict[str, Any] | None = option(
        None,
        "Numbers of images and videos of a prompt for which vLLM reserves memory at its start, as JSON such "
        "as '{\"image\": 5}'. No prompt is refused for having more. Not set: one image.",
        swift="not set",
        resume="free",
        read_if=_IN_PROCESS,
    )
    vllm_engine_kwargs: dict[str, Any] | None = option(
        None,
        "More arguments for vLLM's class LLM, as JSON.",
        swift="not set",
        resume="free",
        read_if=_IN_PROCESS,
    )
