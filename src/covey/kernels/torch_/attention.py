"""Softmax attention of padded rows in torch.

Axes: R rows, H query heads, K key heads, Q queries, L keys, D head width, X rows and key heads.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from covey.kernels.protocol import AttentionOptions

SMALL_CELLS = 4096
"""Queries times keys of a row up to which a kernel call costs more than what it computes."""
# Scores of all rows and heads up to which plain attention is taken for such rows: 32 MiB in float32.
_MANY_CELLS = 1 << 23


class RowAttention(Protocol):
    """Attention of padded rows: (R, H, Q, D), (R, K, L, D) twice, what is added to the scores, (R, H, Q, D)
    out."""

    def __call__(
        self,
        query_RHQD: Tensor,
        key_RKLD: Tensor,
        value_RKLD: Tensor,
        bias_R1QL: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor: ...


def attend_masked(
    query_RHQD: Tensor,
    key_RKLD: Tensor,
    value_RKLD: Tensor,
    bias_R1QL: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Softmax attention with grouped keys, an optional bias of 0 and -inf, soft-capping and sinks.

    `bias` None means plain causal attention of a row over itself. Returns (R, H, Q, D). Soft-capping and
    sinks take the scores out of torch's fused kernels. Keys are repeated where no fused kernel of a GPU takes
    them grouped: torch would hold all scores in float32 there, without a word.
    """
    if options.softcap is not None or options.sinks_H is not None:
        return attend_eager(query_RHQD, key_RKLD, value_RKLD, bias_R1QL, options)
    if bias_R1QL is not None and _is_small(query_RHQD, key_RKLD, options):
        return _attend_small(query_RHQD, key_RKLD, value_RKLD, bias_R1QL, options.scaling)
    if not takes_groups(query_RHQD, bias_R1QL):
        repeats = query_RHQD.shape[1] // key_RKLD.shape[1]
        key_RKLD, value_RKLD = (x.repeat_interleave(repeats, dim=1) for x in (key_RKLD, value_RKLD))
    return F.scaled_dot_product_attention(
        query_RHQD,
        key_RKLD,
        value_RKLD,
        attn_mask=bias_R1QL,
        is_causal=bias_R1QL is None,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=query_RHQD.shape[1] != key_RKLD.shape[1],
    )


def takes_groups(query_RHQD: Tensor, bias_R1QL: Tensor | None) -> bool:
    """Whether a fused kernel attends with fewer keys than queries. On a GPU flash attention does, which knows
    no mask and no float32; the memory-efficient kernel knows both and wants as many keys."""
    if query_RHQD.device.type == "cpu":
        return True
    return bias_R1QL is None and query_RHQD.dtype in (torch.float16, torch.bfloat16)


def attend_eager(
    query_RHQD: Tensor,
    key_RKLD: Tensor,
    value_RKLD: Tensor,
    bias_R1QL: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """The same as two matrix products with a softmax in float32 between them, which are held in memory."""
    num_rows, num_heads, num_queries, _ = query_RHQD.shape
    num_keys = key_RKLD.shape[2]
    if bias_R1QL is None:
        bias_R1QL = query_RHQD.new_full((num_queries, num_keys), float("-inf")).triu(1)[None, None]
    repeats = num_heads // key_RKLD.shape[1]
    keys = key_RKLD.repeat_interleave(repeats, dim=1)
    values = value_RKLD.repeat_interleave(repeats, dim=1)
    scores = (query_RHQD @ keys.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores + bias_R1QL
    if options.sinks_H is not None:
        sinks = options.sinks_H.float().view(1, -1, 1, 1).expand(num_rows, num_heads, num_queries, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if options.dropout > 0:
        weights = F.dropout(weights, options.dropout)
    return weights.to(values.dtype) @ values


def _is_small(query_RHQD: Tensor, key_RKLD: Tensor, options: AttentionOptions) -> bool:
    """Whether the fused kernel's preparations cost more than plain products: short rows on a CPU."""
    cells = query_RHQD.shape[2] * key_RKLD.shape[2]
    all_cells = query_RHQD.shape[0] * query_RHQD.shape[1] * cells
    return (
        query_RHQD.device.type == "cpu"
        and query_RHQD.dtype == torch.float32
        and cells <= SMALL_CELLS
        and all_cells <= _MANY_CELLS
        and options.dropout == 0.0
    )


def _attend_small(
    query_RHQD: Tensor, key_RKLD: Tensor, value_RKLD: Tensor, bias_R1QL: Tensor, scaling: float
) -> Tensor:
    """Plain attention; the queries of a key head are stacked, so that keys are not repeated."""
    num_rows, key_heads = key_RKLD.shape[:2]
    repeats = query_RHQD.shape[1] // key_heads
    stacked_XQD = (query_RHQD * scaling).unflatten(1, (key_heads, repeats)).flatten(2, 3).flatten(0, 1)
    bias_XQL = bias_R1QL.repeat(1, key_heads, repeats, 1).flatten(0, 1)
    scores_XQL = torch.baddbmm(bias_XQL, stacked_XQD, key_RKLD.flatten(0, 1).transpose(1, 2))
    out_XQD = torch.bmm(scores_XQL.softmax(dim=-1), value_RKLD.flatten(0, 1))
    return out_XQD.unflatten(0, (num_rows, key_heads)).unflatten(2, (repeats, -1)).flatten(1, 2)
