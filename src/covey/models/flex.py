"""Attention over streams by torch's flex attention: one compiled kernel for packed rows and shared prompts.

The mask follows from segments and parents, and so does the list of 128 x 128 blocks that hold anything: the
kernel skips the others, so that unrelated segments of a stream cost nothing. Imported where flex attention is
used and nowhere else, because it imports torch's compiler.

Axes: H query heads, K key heads, T tokens of the stream, D head width, B blocks of 128 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_.stream import MaskedRows
from covey.kernels.upload import upload
from covey.models.attention import StreamLayout
from covey.models.prefix import Prefix
from covey.types import StreamSegment

BLOCK = 128
"""Side of a block in tokens; streams are padded to a multiple of it."""

# The narrowest head that the kernel takes on a GPU.
_MIN_WIDTH = 16
# Blocks of queries whose share of every key block is counted at once.
_COUNTED = 16

# One function for every layer. Stream lengths become symbols of the compiled graph; what still compiles anew
# are windows, data types and passes without gradient, which are more than the 8 that torch allows before it
# falls back to an implementation whose scores fill the memory. Scales and soft caps must not become symbols:
# the kernel has them as constants, and another model in this process has others.
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
torch._dynamo.config.specialize_float = True
_COMPILED: Callable[..., Any] = torch.compile(flex_attention)


class FlexLayout:
    """The attention of one stream by flex attention; dropout and heads under 16 wide take masked rows.

    Without `compiled` torch's unfused implementation runs, which holds every score: for tests.
    """

    def __init__(
        self,
        segments: Sequence[StreamSegment],
        device: torch.device | str,
        *,
        compiled: bool,
        prefix: Prefix | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self._device, self._prefix = device, prefix
        self._first = 0 if prefix is None else prefix.first
        self._attend: Any = _COMPILED if compiled else flex_attention
        self._plan = _plan(self.segments, device, self._first)
        self._masks: dict[int | None, BlockMask] = {}
        self._masked: StreamLayout | None = None

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, T, D) of every segment."""
        narrowest = min(query_1HTD.shape[-1], value_1KTD.shape[-1])
        if options.dropout > 0 or (query_1HTD.is_cuda and narrowest < _MIN_WIDTH):
            return self._by_rows().attend(layer, query_1HTD, key_1KTD, value_1KTD, options)
        first, length = self._first, query_1HTD.shape[2]
        if self._prefix is not None:
            key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (key_1KTD, value_1KTD))
            found = self._prefix.pair(layer, key_TKD, value_TKD, extends=first > 0)
            key_1KTD, value_1KTD = (x.transpose(0, 1)[None] for x in found)
        # Padding keeps the kernel to one variant: lengths that blocks divide, and none under one block.
        behind = self._plan.length - first - length
        query = F.pad(query_1HTD, (0, 0, first, behind))
        key, value = (F.pad(x, (0, 0, 0, behind)) for x in (key_1KTD, value_1KTD))
        # A pad of nothing keeps the strides, and other strides are compiled anew.
        query, key, value = (x.contiguous() for x in (query, key, value))
        out, aux = self._attend(
            query,
            key,
            value,
            score_mod=None if options.softcap is None else _softcap(options.softcap),
            block_mask=self.block_mask(options.sliding_window),
            scale=options.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        if options.sinks_H is not None:
            # A sink is one more key without a value: the weights of the others shrink by a common factor.
            share_1HT1 = torch.sigmoid(aux.lse - options.sinks_H.float().view(1, -1, 1))[..., None]
            out = (out.float() * share_1HT1).to(value.dtype)
        return out[:, :, first : first + length]  # type: ignore[no-any-return]

    def block_mask(self, window: int | None) -> BlockMask:
        """The blocks of keys that each block of queries sees, in part or whole, for a sliding window."""
        if window not in self._masks:
            self._masks[window] = self._plan.block_mask(window)
        return self._masks[window]

    def _by_rows(self) -> StreamLayout:
        if self._masked is None:
            rows = MaskedRows(self.segments, self._first, self._device)
            self._masked = StreamLayout(self.segments, self._device, self._prefix, rows)
            self._masked.first = self._first
        return self._masked


class _Plan:
    """What every token of a stream padded to whole blocks sees, int32 on the device.

    A token is seen by itself and by later ones before `end`, the end of what grows from its segment. `ranges`
    says the same from the other side: of a token's segment and of each ancestor the start, the end and the
    position of the start; they are empty where there are fewer ancestors. Padding is one more segment. Tokens
    before `first` are seen and see nothing themselves.
    """

    def __init__(
        self,
        position: np.ndarray[Any, Any],
        end: np.ndarray[Any, Any],
        ranges: Sequence[tuple[np.ndarray[Any, Any], ...]],
        device: torch.device | str,
        first: int,
    ) -> None:
        def tensor(array: np.ndarray[Any, Any]) -> Tensor:
            return upload(array.astype(np.int32), device)

        self.length, self._first = len(position), first
        self._position_T, self._end_T = tensor(position), tensor(end)
        self._ranges = [[tensor(array) for array in arrays] for arrays in ranges]

    def block_mask(self, window: int | None) -> BlockMask:
        seen_BB = self._seen(window)
        seen_BB[: self._first // BLOCK] = 0
        is_full_BB = seen_BB == BLOCK * BLOCK
        partial, full = (_ordered(x) for x in ((seen_BB > 0) & ~is_full_BB, is_full_BB))
        return BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=BLOCK,
            mask_mod=self._mask(window),
            seq_lengths=(self.length, self.length),
        )

    def _mask(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        position_T, end_T = self._position_T, self._end_T

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < end_T[key])

        if window is None:
            return visible
        # A tensor and not a number, for which another window would compile anew.
        reach = torch.full((), window, dtype=torch.int32, device=end_T.device)

        def visible_near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(b, h, query, key) & (position_T[query] - position_T[key] < reach)

        return visible_near

    def _seen(self, window: int | None) -> Tensor:
        """How many of a block's 128 x 128 cells are seen, (B, B)."""
        here_T = torch.arange(self.length, device=self._end_T.device, dtype=torch.int32)
        edge_B = torch.arange(0, self.length, BLOCK, device=here_T.device, dtype=torch.int32)
        rows = []
        for chunk in range(0, self.length, _COUNTED * BLOCK):
            part = slice(chunk, chunk + _COUNTED * BLOCK)
            count_CB = here_T.new_zeros(len(here_T[part]), len(edge_B))
            for start_T, end_T, before_T in self._ranges:
                first_C, last_C = start_T[part], torch.minimum(end_T, here_T + 1)[part]
                if window is not None:
                    hidden_C = self._position_T[part] - (window - 1) - before_T[part]
                    first_C = torch.minimum(first_C + hidden_C.clamp_min(0), last_C)
                count_CB += _overlap(first_C, last_C, edge_B)
            rows.append(count_CB.unflatten(0, (-1, BLOCK)).sum(1))
        return torch.cat(rows)


def _plan(segments: tuple[StreamSegment, ...], device: torch.device | str, first: int) -> _Plan:
    total = sum(s.length for s in segments)
    padded = math.ceil(total / BLOCK) * BLOCK
    if padded > total:
        segments = (*segments, StreamSegment(start=total, length=padded - total))
    paths: list[list[tuple[int, int, int]]] = []
    ends = [s.start + s.length for s in segments]
    for number, segment in enumerate(segments):
        above = [] if segment.parent is None else paths[segment.parent]
        before = above[0][2] + above[0][1] - above[0][0] if above else 0
        paths.append([(segment.start, segment.start + segment.length, before), *above])
        while segment.parent is not None:
            ends[segment.parent] = ends[number]
            segment = segments[segment.parent]
    lengths = [s.length for s in segments]
    ranges = []
    for level in range(max(len(path) for path in paths)):
        listed = [path[level] if level < len(path) else (0, 0, 0) for path in paths]
        ranges.append(tuple(np.repeat(values, lengths) for values in zip(*listed, strict=True)))
    starts, _, ahead = ranges[0]
    return _Plan(np.arange(padded) - starts + ahead, np.repeat(ends, lengths), ranges, device, first)


def _overlap(first_C: Tensor, end_C: Tensor, edge_B: Tensor) -> Tensor:
    """How many keys of [first, end) lie in each block, (C, B)."""
    last_CB = torch.minimum(end_C[:, None], edge_B + BLOCK)
    return (last_CB - torch.maximum(first_C[:, None], edge_B)).clamp_min(0)


def _ordered(is_there_BB: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks a row has and their numbers first, as `BlockMask` lists them: (1, 1, B), (1, 1, B,
    B)."""
    count_B = is_there_BB.sum(-1).to(torch.int32)
    number_BB = torch.argsort(is_there_BB.to(torch.int32), dim=-1, descending=True, stable=True)
    return count_B[None, None], number_BB.to(torch.int32)[None, None].contiguous()


def _softcap(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
