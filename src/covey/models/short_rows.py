"""Attention of a stream of short rows in few kernel calls, with a backward pass of its own.

A head of a token is one row of memory: a single gather takes queries, keys and values to where batched
products want them, and a single scatter brings the gradients back.

Axes: T tokens, X all heads, H query heads, K key heads, D head width, R rows, Q queries, L keys, G query
heads of a key head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class ShortRows:
    """Where everything lies for one number of heads.

    `take` are the heads that are gathered: (R, K, G, Q) of queries, then (R, K, L) of keys and of values,
    flat; `give` is the place of every token's heads (T, H) among the queries; `bias` is 0 or -inf,
    (R x K, G x Q, L).
    """

    take: Tensor
    give: Tensor
    bias: Tensor

    @classmethod
    def of(
        cls, query_RQ: Tensor, key_RL: Tensor, restore_T: Tensor, bias_R1QL: Tensor, heads: tuple[int, int]
    ) -> ShortRows:
        """From token numbers; `restore_T` is the place of every token among (R, Q)."""
        queries, keys = heads
        (rows, width), longest = query_RQ.shape, key_RL.shape[1]
        every = queries + 2 * keys
        head_H = torch.arange(queries)
        head_1K1 = torch.arange(queries, queries + keys)[None, :, None]
        query = query_RQ[:, None] * every + head_H[None, :, None]
        key = key_RL[:, None] * every + head_1K1
        row_T, place_T = restore_T // width, restore_T % width
        give_TH = (row_T[:, None] * queries + head_H) * width + place_T[:, None]
        bias = bias_R1QL.repeat(1, keys, queries // keys, 1).view(rows * keys, -1, longest)
        return cls(torch.cat([part.flatten() for part in (query, key, key + keys)]), give_TH.flatten(), bias)

    def attend(self, heads_TXD: Tensor, scaling: float) -> Tensor:
        """Attention output (T, H, D)."""
        return _Attend.apply(heads_TXD, self, scaling)  # type: ignore[no-any-return]

    def parts(self, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (R x K, G x Q, D), keys and values (R x K, L, D) as views of what was gathered."""
        batch, stacked, longest = self.bias.shape
        sizes = [batch * stacked, batch * longest, batch * longest]
        query, key, value = (part.view(batch, -1, taken.shape[1]) for part in taken.split(sizes))
        return query, key, value


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_TXD: Tensor, rows: ShortRows, scaling: float) -> Tensor:
        width = heads_TXD.shape[2]
        taken = heads_TXD.reshape(-1, width).index_select(0, rows.take)
        query, key, value = rows.parts(taken)
        weights = torch.baddbmm(rows.bias, query, key.transpose(1, 2), alpha=scaling).softmax(dim=-1)
        out = torch.bmm(weights, value).view(-1, width).index_select(0, rows.give)
        ctx.save_for_backward(taken, weights)
        ctx.rows, ctx.scaling, ctx.shape = rows, scaling, heads_TXD.shape
        return out.view(heads_TXD.shape[0], -1, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        taken, weights = ctx.saved_tensors
        rows: ShortRows = ctx.rows
        query, key, value = rows.parts(taken)
        width = taken.shape[1]
        grad = taken.new_zeros(query.shape)
        grad.view(-1, width).index_copy_(0, rows.give, grad_THD.reshape(-1, width))
        grad_taken = torch.empty_like(taken)
        grad_query, grad_key, grad_value = rows.parts(grad_taken)
        torch.bmm(weights.transpose(1, 2), grad, out=grad_value)
        slope = torch.bmm(grad, value.transpose(1, 2))
        slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype).mul_(ctx.scaling)
        torch.bmm(slope, key, out=grad_query)
        torch.bmm(slope.transpose(1, 2), query, out=grad_key)
        # Padding is gathered from token 0 and has a gradient of exactly zero.
        grad_heads = taken.new_zeros(ctx.shape)
        grad_heads.view(-1, width).index_add_(0, rows.take, grad_taken)
        return grad_heads, None, None
