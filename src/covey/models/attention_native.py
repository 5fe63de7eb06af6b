"""Attention of a stream in C: each pass over all segments is one call.

Axes: T tokens, X all heads, H query heads, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.types import StreamSegment

_SEGMENTS = ("family", "start", "length", "before", "parent")
_Attention = structure(
    "_Attention",
    **dict.fromkeys(("heads", "key_heads", "head_width", "families", "threads", "longest"), INT),
    scaling=FLOAT,
    **dict.fromkeys((*_SEGMENTS, "x", "out", "lse", "grad", "grad_x", "held"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Families:
    """The segments of a stream as int64: for each its place, the tokens of its ancestors, its parent (-1 for
    a root), and where each family, a root with what grows from it, begins among them. `longest` is the
    longest way from a root to the end of a segment, in tokens."""

    family: Tensor
    start: Tensor
    length: Tensor
    before: Tensor
    parent: Tensor
    longest: int

    @classmethod
    def of(cls, segments: Sequence[StreamSegment]) -> Families:
        """From segments in the order of the stream."""
        before: list[int] = []
        for segment in segments:
            above = segment.parent
            before.append(0 if above is None else before[above] + segments[above].length)
        roots = [number for number, segment in enumerate(segments) if segment.parent is None]
        return cls(
            family=torch.tensor([*roots, len(segments)]),
            start=torch.tensor([segment.start for segment in segments]),
            length=torch.tensor([segment.length for segment in segments]),
            before=torch.tensor(before),
            parent=torch.tensor([-1 if segment.parent is None else segment.parent for segment in segments]),
            longest=max(b + segment.length for b, segment in zip(before, segments, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class CompiledAttention:
    """What computes the attention of one stream in every layer."""

    library: ctypes.CDLL
    families: Families

    def attend_heads(self, layer: int, heads_TXD: Tensor, queries: int, scaling: float) -> Tensor:
        """Attention output (T, H, D) of `queries` heads with the keys and values behind them."""
        return _Attend.apply(heads_TXD, self, queries, scaling)  # type: ignore[no-any-return]

    def arguments(self, heads_TXD: Tensor, queries: int, scaling: float, **places: Tensor) -> Any:
        """What the library is called with, and the scratch that has to live as long."""
        _, every, width = heads_TXD.shape
        names = {name: getattr(self.families, name) for name in _SEGMENTS}
        found = _Attention(
            heads=queries,
            key_heads=(every - queries) // 2,
            head_width=width,
            families=self.families.family.shape[0] - 1,
            threads=torch.get_num_threads(),
            longest=self.families.longest,
            scaling=scaling,
            x=place(heads_TXD),
            **{name: place(tensor) for name, tensor in {**names, **places}.items()},
        )
        held = heads_TXD.new_empty(found.threads * self.library.scratch(ctypes.byref(found)))
        found.held = place(held)
        return found, held


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_TXD: Tensor, attention: CompiledAttention, queries: int, scaling: float
    ) -> Tensor:
        tokens, _, width = heads_TXD.shape
        heads_TXD = heads_TXD.contiguous()
        out_THD = heads_TXD.new_empty(tokens, queries, width)
        lse_TH = heads_TXD.new_empty(tokens, queries)
        arguments, _held = attention.arguments(heads_TXD, queries, scaling, out=out_THD, lse=lse_TH)
        attention.library.attend(ctypes.byref(arguments))
        ctx.save_for_backward(heads_TXD, lse_TH)
        ctx.attention, ctx.queries, ctx.scaling = attention, queries, scaling
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        heads_TXD, lse_TH = ctx.saved_tensors
        grad_heads_TXD, grad_THD = torch.empty_like(heads_TXD), grad_THD.contiguous()
        arguments, _held = ctx.attention.arguments(
            heads_TXD, ctx.queries, ctx.scaling, lse=lse_TH, grad=grad_THD, grad_x=grad_heads_TXD
        )
        ctx.attention.library.attend_backward(ctypes.byref(arguments))
        return grad_heads_TXD, None, None, None
