"""What vLLM is started with: from settings of covey to arguments of `vllm.LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.options.vllm import LORA_RANKS
from covey.plan.check_filters import MOST_LISTED
from covey.plan.vllm_limits import OWNED, UNTRIED
from covey.texts import tr

EXTENSION = "covey.rollout.vllm.worker.Publishing"
"""The class that vLLM adds to its workers, by name, so that a worker in another process finds it."""

TIES = 64
"""Tokens that may be as probable as the last one that top_k keeps: in bfloat16 many logits are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How one vLLM is started.

    model            directory of the model
    dtype            float32 or bfloat16, in which weights are published and sampled from
    max_model_len    tokens of the longest prompt with its completion
    max_num_seqs     completions side by side
    on_gpu           whether it samples on a GPU; on a CPU the cache has `cache_bytes`
    memory_share     of the GPU's whole memory, with weights and cache
    own_processes    whether its workers are processes of their own; else it runs in this one
    tensor_parallel  GPUs, or processes on a CPU, that it spans
    by_torchrun      whether the processes of the run each hold one, or a part of one
    group_name       of the processes that are one vLLM, which no others have, with `by_torchrun`
    device_number    of this process's device on its machine, with `by_torchrun`
    has_weights      whether it reads the weights of `model`; else it waits for the first publish
    sleep_level      0, 1 or 2: what it gives back at rest
    lora_rank        the highest rank of published adapters; 0 where there are none
    media_limits     images and videos of a prompt, by kind, for which it reserves memory at its start, where
                     the model sees images; no prompt is held to them
    image_pixels     the fewest and the most pixels of an image; None: as the model's own files say
    extra            further arguments of `vllm.LLM`
    """

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    on_gpu: bool
    memory_share: float = 0.9
    cache_bytes: int = 0
    tensor_parallel: int = 1
    own_processes: bool = False
    by_torchrun: bool = False
    group_name: str = ""
    device_number: int = 0
    has_weights: bool = False
    enforce_eager: bool = False
    prefix_caching: bool = True
    sleep_level: int = 0
    lora_rank: int = 0
    media_limits: Mapping[str, Any] = field(default_factory=dict)
    image_pixels: tuple[int, int] | None = None
    trust_remote_code: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(OWNED & self.extra.keys())
        if taken:
            raise ValueError(f"vLLM's {', '.join(taken)} cannot be set as an extra argument")
        if self.by_torchrun and not self.group_name:
            raise ValueError("vLLM in one of several processes needs the name of its group")
        if self.lora_rank > LORA_RANKS[-1]:
            raise ValueError(f"vLLM accepts adapters up to rank {LORA_RANKS[-1]}, not {self.lora_rank}")

    @property
    def highest_rank(self) -> int:
        """The highest rank of an adapter that it takes: vLLM is told one of a few; 0 where it takes none."""
        return min(rank for rank in LORA_RANKS if rank >= self.lora_rank) if self.lora_rank else 0

    @property
    def sleeps(self) -> bool:
        """Whether it gives memory back at rest, which vLLM does on GPUs alone."""
        return self.on_gpu and self.sleep_level > 0

    @property
    def sleeps_deeply(self) -> bool:
        """Whether its weights are gone after a rest, so that they have to be published again."""
        return self.sleeps and self.sleep_level == 2


def arguments_of(settings: VllmSettings) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Token ids go in and come out, so no tokenizer is loaded; the model's generation_config.json has no say;
    logprobs are those that are sampled from, at the request's temperature.
    """
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": 0,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "load_format": "auto" if settings.has_weights else "dummy",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "disable_log_stats": True,
        "max_logprobs": MOST_LISTED + TIES,
    }
    if settings.on_gpu:
        arguments["gpu_memory_utilization"] = settings.memory_share
        arguments["enable_sleep_mode"] = settings.sleeps
    else:
        arguments["kv_cache_memory_bytes"] = settings.cache_bytes
        # This build ends at a prompt with a seed that it computes in two parts.
        arguments["enable_chunked_prefill"] = False
    if settings.by_torchrun:
        arguments["distributed_executor_backend"] = "external_launcher"
    if settings.by_torchrun and settings.tensor_parallel > 1:
        # Each step ends before the next one begins: between them the ranks tell each other what is new.
        arguments["async_scheduling"] = False
    if settings.lora_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": settings.highest_rank, "max_loras": 1}
    if settings.media_limits:
        arguments |= _of_images(settings)
    return arguments | dict(settings.extra)


def _of_images(settings: VllmSettings) -> dict[str, Any]:
    """Return what a model that sees images is started with, whose tokens and pixels covey sends as they are
    computed with."""
    arguments: dict[str, Any] = {
        # vLLM's processor of the model, which is given nothing, asks for a tokenizer.
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": dict(settings.media_limits),
        # They come normalized: vLLM would do it again without a word.
        "mm_device_do_normalize": False,
        # It would keep up to 4 GiB of pixels that come with each request anyway.
        "mm_processor_cache_gb": 0,
    }
    if settings.image_pixels is not None:
        least, most = settings.image_pixels
        arguments["mm_processor_kwargs"] = {"size": {"shortest_edge": least, "longest_edge": most}}
    return arguments


def in_words(settings: VllmSettings, version: str, *, is_merged: bool) -> str:
    """Return what a vLLM of a version is, in words; where `is_merged`, it is sent adapters within weights."""
    where = tr("a GPU ({untried})", untried=UNTRIED) if settings.on_gpu else tr("the CPU")
    beside = ""
    if settings.lora_rank:
        beside = tr(" and adapters up to rank {highest_rank}", highest_rank=settings.highest_rank)
    if is_merged:
        beside = tr(" with the adapter merged in, because vLLM does not support adapters for this model")
    return tr(
        "vLLM {version} on {where}, with a {dtype} copy of the weights{beside}; up to {max_num_seqs} "
        "completions at a time, each up to {max_model_len} tokens with its prompt",
        version=version,
        dtype=settings.dtype,
        beside=beside,
        where=where,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
    )
