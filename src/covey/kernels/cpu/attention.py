"""Attention of a stream in C.

Axes: T tokens of a stream, L those and the ones of a prompt before them, H query heads, K key heads, X both
with the keys and values of K heads, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.cpu.library import FLOAT, INT, POINTER, address, structure
from covey.kernels.protocol import AttentionOptions, StreamAttention
from covey.types import StreamSegment

SEGMENTS = ("start", "length", "before", "parent")
"""What a call is told of segments, besides where families begin among them."""

Attention = structure(
    "Attention",
    **dict.fromkeys(("heads", "key_heads", "head_width", "families", "threads", "longest"), INT),
    scaling=FLOAT,
    **dict.fromkeys(("family", *SEGMENTS, "x", "out", "lse", "grad", "grad_x", "held"), POINTER),
    past=INT,
    **dict.fromkeys(("past_keys", "grad_past_keys"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Families:
    """The segments of a stream as arrays of int64: of each its start, its length, the tokens of its ancestors
    and its parent (-1 for a root), row after row; and where each family, a root with what grows from it,
    begins among them, and the last one ends. `longest` is the longest way from a root to the end of a
    segment, in tokens."""

    family: Any
    segments: Any
    longest: int

    @classmethod
    def of(cls, segments: Sequence[StreamSegment]) -> Families:
        """From segments in the order of the stream."""
        before: list[int] = []
        for segment in segments:
            above = segment.parent
            before.append(0 if above is None else before[above] + segments[above].length)
        starts, lengths = [s.start for s in segments], [s.length for s in segments]
        parents = [-1 if s.parent is None else s.parent for s in segments]
        roots = [i for i, parent in enumerate(parents) if parent < 0]
        return cls(
            family=(INT * (len(roots) + 1))(*roots, len(segments)),
            segments=(INT * (4 * len(segments)))(*starts, *lengths, *before, *parents),
            longest=max(map(int.__add__, before, lengths)),
        )

    @property
    def largest_share(self) -> float:
        """Of all pairs of a query and a key, the part that the largest family has."""
        _, length_S, before_S, _ = np.reshape(self.segments, (len(SEGMENTS), -1))
        pairs_S = length_S * (2 * before_S + length_S + 1)
        pairs_F = np.add.reduceat(pairs_S, self.family[:-1])
        return float(pairs_F.max() / pairs_F.sum())

    def put(self, attention: Any) -> None:
        """Tell a call of its stream; the arrays have to live as long."""
        attention.families, attention.longest = len(self.family) - 1, self.longest
        attention.threads = torch.get_num_threads()
        for name, found in zip(("family", *SEGMENTS), self.addresses(), strict=True):
            setattr(attention, name, found)

    def addresses(self) -> tuple[int, ...]:
        """Where the first of each family is said, and `SEGMENTS`."""
        first, row = ctypes.addressof(self.segments), ctypes.sizeof(self.segments) // len(SEGMENTS)
        return ctypes.addressof(self.family), *(first + number * row for number in range(len(SEGMENTS)))


_DTYPES = (torch.float32, torch.bfloat16)


class CompiledStream:
    """Attention of a stream in C where it is plain, also under a window that holds the whole stream; `rows`
    compute the rest."""

    def __init__(
        self, library: ctypes.CDLL, segments: Sequence[StreamSegment], rows: StreamAttention
    ) -> None:
        self._library, self._segments, self._rows = library, segments, rows

    @cached_property
    def _families(self) -> Families:
        return Families.of(self._segments)

    def attend(
        self, query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """As the protocol says."""
        window = options.sliding_window
        is_plain = options.is_plain and (window is None or window >= self._families.longest)
        if not is_plain or not serves(self._library, self._families, query_THD, value_LKD):
            return self._rows.attend(query_THD, key_LKD, value_LKD, options)
        call = self._library, self._families, options.scaling
        return Attend.apply(*call, query_THD, key_LKD, value_LKD)  # type: ignore[no-any-return]


def serves(library: ctypes.CDLL, families: Families, query_THD: Tensor, value_LKD: Tensor) -> bool:
    """Whether the library computes such heads, with work for every thread: one takes a key head of a family
    at a time."""
    (_, queries, width), (_, keys, value_width) = query_THD.shape, value_LKD.shape
    is_known = width == value_width and width % library.panel_width() == 0 and queries % keys == 0
    if not is_known or query_THD.dtype not in _DTYPES or query_THD.device.type != "cpu":
        return False
    return families.largest_share * torch.get_num_threads() <= keys


class Attend(torch.autograd.Function):
    """Plain attention (T, H, D) of queries (T, H, D) with keys and values (L, K, D), in their dtype, computed
    in float32. Keys and values may have tokens in front, of segments that have no queries."""

    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        families: Families,
        scaling: float,
        *heads: Tensor,
    ) -> Tensor:
        query_THD = heads[0]
        out_THD = torch.empty(query_THD.shape, dtype=torch.float32)
        lse_TH = out_THD.new_empty(out_THD.shape[:2])
        call = _Call(library, families, scaling, *heads)
        call.run("attend", out=out_THD, lse=lse_TH)
        ctx.save_for_backward(*heads, lse_TH)
        ctx.given = library, families, scaling
        return out_THD.to(query_THD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        *heads, lse_TH = ctx.saved_tensors
        call = _Call(*ctx.given, *heads)
        grad_TXD, grad_PXD = torch.empty_like(call.heads_TXD), torch.zeros_like(call.past_PXD)
        grad = grad_THD.float().contiguous()
        call.run("attend_backward", lse=lse_TH, grad=grad, grad_x=grad_TXD, grad_past_keys=grad_PXD)
        keys, dtype = heads[1].shape[1], grad_THD.dtype
        grad_query, *own = grad_TXD.split([grad_THD.shape[1], keys, keys], dim=1)
        both = zip(grad_PXD.split(keys, dim=1), own, strict=True)
        grad_key, grad_value = (torch.cat(parts).to(dtype) for parts in both)
        return None, None, None, grad_query.to(dtype), grad_key, grad_value


class _Call:
    """A call of the library: the heads of a stream and what is before it, side by side in float32."""

    def __init__(
        self,
        library: ctypes.CDLL,
        families: Families,
        scaling: float,
        query_THD: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
    ) -> None:
        (tokens, queries, width), keys = query_THD.shape, key_LKD.shape[1]
        past = key_LKD.shape[0] - tokens
        self.past_PXD = torch.cat([key_LKD[:past], value_LKD[:past]], dim=1).float()
        # Copied and converted in one go.
        self.heads_TXD = self.past_PXD.new_empty(tokens, queries + 2 * keys, width)
        parts = self.heads_TXD.split([queries, keys, keys], dim=1)
        for to, given in zip(parts, (query_THD, key_LKD[past:], value_LKD[past:]), strict=True):
            to.copy_(given)
        self._library, self._families = library, families
        self._arguments = Attention(
            heads=queries, key_heads=keys, head_width=width, scaling=scaling, past=past
        )
        families.put(self._arguments)
        self._arguments.x, self._arguments.past_keys = address(self.heads_TXD), address(self.past_PXD)

    def run(self, name: str, **tensors: Tensor) -> None:
        arguments = self._arguments
        size = self._library.attention_scratch(ctypes.byref(arguments))
        held = self.heads_TXD.new_empty(arguments.threads * size)
        for field, tensor in {**tensors, "held": held}.items():
            setattr(arguments, field, address(tensor))
        getattr(self._library, name)(ctypes.byref(arguments))
