"""Which of torch's kernels attends to masked rows on a GPU: torch chooses by itself, and says nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from covey.kernels.torch_.attention import takes_groups
from covey.models.policy import Policy

# Tokens of the rows that torch is asked about; its choice does not depend on them.
_TOKENS = 32


def kernels(policy: Policy) -> dict[str, str]:
    """The kernel for prompts that are sampled from and, where the update attends by it too, for rows behind a
    prompt: flash_attention, efficient_attention, cudnn_attention or math, as torch would choose it now.

    Empty on a CPU, where torch is not to be asked, and for a model whose attention is products anyway (a soft
    cap, sinks).
    """
    config: Any = policy.model.config
    config = config.get_text_config()
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    has_sinks = any(name.endswith(".sinks") for name, _ in policy.named_parameters())
    if policy.device.type != "cuda" or is_capped or has_sinks or not hasattr(torch, "_fused_sdp_choice"):
        return {}
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    dtype = next(policy.parameters()).dtype
    query = torch.empty(1, heads, _TOKENS, width, dtype=dtype, device=policy.device)
    found = {"prompts": _choice(query, keys, None)}
    if policy.attention == "sdpa":
        # Some kernels attend without gradients alone.
        query.requires_grad_()
        found["rows behind a prompt"] = _choice(query, keys, query.new_zeros(1, 1, _TOKENS, _TOKENS))
    return found


def _choice(query_RHQD: torch.Tensor, key_heads: int, bias_R1QL: torch.Tensor | None) -> str:
    heads = key_heads if takes_groups(query_RHQD, bias_R1QL) else query_RHQD.shape[1]
    key = query_RHQD[:, :heads]
    chosen: int = torch._fused_sdp_choice(  # type: ignore[attr-defined]
        query_RHQD,
        key,
        key,
        attn_mask=bias_R1QL,
        is_causal=bias_R1QL is None,
        enable_gqa=heads != query_RHQD.shape[1],
    )
    return SDPBackend(chosen).name.lower()
