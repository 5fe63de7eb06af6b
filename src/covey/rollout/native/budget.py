"""How many rows the cache may hold, from the memory that is free."""

from __future__ import annotations

import os
from typing import Any

import torch

from covey.models.policy import Policy

# The share of free memory that a cache may take: training peaks come on top of it later in the step.
_SHARE = 0.3


def kv_bytes_per_token(policy: Policy) -> int:
    """Bytes of keys and values of one token over all layers, from the model's config."""
    config: Any = policy.model.config
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = next(policy.parameters()).element_size()
    return int(2 * config.num_hidden_layers * kv_heads * width * size)


def free_bytes(device: torch.device) -> int:
    """Memory that is free now: of the GPU, with what torch holds of it and does not use, else of the
    machine."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def rows_that_fit(policy: Policy, tokens_per_row: int, given_back: int = 0) -> int:
    """Rows of this length, prompt included, for which a cache fits once so many bytes are given back; at
    least one."""
    row = kv_bytes_per_token(policy) * tokens_per_row
    return max(1, int(_SHARE * (free_bytes(policy.device) + given_back)) // row)
