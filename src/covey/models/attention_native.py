"""Attention of a stream in C: each pass over all segments is one call.

Axes: T tokens, X all heads, H query heads, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.types import StreamSegment

_SEGMENTS = ("family", "start", "length", "parent_start", "parent_length")
_Attention = structure(
    "_Attention",
    **dict.fromkeys(("heads", "key_heads", "head_width", "families", "threads", "scratch"), INT),
    scaling=FLOAT,
    **dict.fromkeys((*_SEGMENTS, "x", "out", "lse", "grad", "grad_x", "held"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Families:
    """The segments of a stream, those of one parent behind it: for each its place and its parent's, as int64,
    and where each family begins among them. `longest` are the tokens of the longest parent and of the longest
    segment."""

    family: Tensor
    start: Tensor
    length: Tensor
    parent_start: Tensor
    parent_length: Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, segments: Sequence[StreamSegment]) -> Families:
        """From segments in the order of the stream; a parent has none itself."""
        members: dict[int, list[int]] = {}
        for number, segment in enumerate(segments):
            members.setdefault(number if segment.parent is None else segment.parent, []).append(number)
        listed = [segments[number] for family in members.values() for number in family]
        parents = [None if segment.parent is None else segments[segment.parent] for segment in listed]
        lengths = [0 if parent is None else parent.length for parent in parents]
        return cls(
            family=torch.tensor([0, *accumulate(len(family) for family in members.values())]),
            start=torch.tensor([segment.start for segment in listed]),
            length=torch.tensor([segment.length for segment in listed]),
            parent_start=torch.tensor([0 if parent is None else parent.start for parent in parents]),
            parent_length=torch.tensor(lengths),
            longest=(max(lengths), max(segment.length for segment in listed)),
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
        threads, panel = torch.get_num_threads(), self.library.panel_width()
        keys = sum(-(-longest // panel) * panel for longest in self.families.longest)
        scratch = 2 * keys * (width + self.library.queries())
        held = heads_TXD.new_empty(threads * scratch)
        names = {name: getattr(self.families, name) for name in _SEGMENTS}
        return _Attention(
            heads=queries,
            key_heads=(every - queries) // 2,
            head_width=width,
            families=self.families.family.shape[0] - 1,
            threads=threads,
            scratch=scratch,
            scaling=scaling,
            x=place(heads_TXD),
            held=place(held),
            **{name: place(tensor) for name, tensor in {**names, **places}.items()},
        ), held


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
        grad_heads_TXD, grad_THD = torch.zeros_like(heads_TXD), grad_THD.contiguous()
        arguments, _held = ctx.attention.arguments(
            heads_TXD, ctx.queries, ctx.scaling, lse=lse_TH, grad=grad_THD, grad_x=grad_heads_TXD
        )
        ctx.attention.library.attend_backward(ctypes.byref(arguments))
        return grad_heads_TXD, None, None, None
