"""vLLM in a training process: from a run's options to the engine."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from covey.checks.launch import num_ranks
from covey.checks.survey import model_dir
from covey.comm import Comm, neighbours
from covey.media.sizes import limits_of
from covey.models.live import LiveModel
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.memory import recompute_of, training_of
from covey.plan.memory_rollout import requests_of
from covey.plan.memory_vllm import cache_bytes, held_tokens, largest_adapter_rank, side_by_side
from covey.rollout.engine import Engine
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.group import GroupEngine
from covey.rollout.vllm.settings import VllmSettings
from covey.training.process import compute_dtype


def colocated(
    config: Config, facts: Facts, policy: Policy, comm: Comm, tokenizer: Tokenizer, live: LiveModel | None
) -> Engine:
    """vLLM beside `policy`, on its device, or this rank's part of one over several ranks. It reads no weights
    of the model: they come with the first publish. Collective."""
    group = neighbours(comm, config.vllm_tensor_parallel_size)
    name = comm.gather_json(secrets.token_hex(8))[comm.rank - group.rank]
    directory = model_dir(config) if live is None else live.directory
    given = vllm_settings(config, facts, directory, policy.device, name)
    read = None
    if policy.vision is not None:
        given, read = with_images(given, config, directory), policy.vision.read
    own = VllmEngine(given, comm=group, tokenizer=tokenizer, read=read)
    return own if group.world == 1 else GroupEngine(own, group)


def vllm_settings(
    config: Config, facts: Facts, directory: Path, device: torch.device, group_name: str = ""
) -> VllmSettings:
    """What a vLLM of this run is started with; the processes that are one vLLM have a name where the run has
    several."""
    spans = config.vllm_tensor_parallel_size
    prompt = facts.prompts.longest or config.max_length or 1
    tokens = held_tokens(config, prompt, facts.model.context)
    rows = max((rows for rows, _ in requests_of(config, facts)), default=1)
    on_gpu = device.type == "cuda"
    how = training_of(config, facts, recompute_of(config, facts))
    model = facts.model.sizes
    return VllmSettings(
        model=str(directory),
        dtype=str(compute_dtype(config, device)).removeprefix("torch."),
        max_model_len=tokens,
        max_num_seqs=side_by_side(config, rows * spans),
        on_gpu=on_gpu,
        memory_share=_share_of_all(config, facts, device) if on_gpu else 0.0,
        cache_bytes=_USUAL_CACHE
        if model is None
        else cache_bytes(config, model, how.element, tokens, rows, spans),
        tensor_parallel=spans,
        by_torchrun=num_ranks(os.environ) > 1,
        group_name=group_name,
        device_number=device.index or 0,
        enforce_eager=config.vllm_enforce_eager,
        prefix_caching=config.vllm_enable_prefix_caching,
        sleep_level=max(1, config.sleep_level) if config.vllm_enable_sleep_mode else 0,
        lora_rank=largest_adapter_rank(config),
        trust_remote_code=config.trust_remote_code,
        extra=config.vllm_engine_kwargs or {},
    )


def with_images(given: VllmSettings, config: Config, directory: Path) -> VllmSettings:
    """Return how a vLLM is started that is sent images: with room for one of a prompt at least."""
    limits = limits_of(directory, max_pixels=config.max_pixels, max_tokens=config.image_max_token_num)
    return replace(
        given,
        media_limits={"image": 1, "video": 0, **(config.vllm_limit_mm_per_prompt or {})},
        image_pixels=(limits.min_pixels, limits.max_pixels),
    )


# Of a model whose sizes nobody could read.
_USUAL_CACHE = 1 << 30


def _share_of_all(config: Config, facts: Facts, device: torch.device) -> float:
    """vLLM's share of the GPU's whole memory: as it is typed, or as it was solved of what is free."""
    if config.vllm_gpu_memory_utilization is not None:
        return config.vllm_gpu_memory_utilization
    return facts.layout.engine_bytes / torch.cuda.mem_get_info(device)[1]
