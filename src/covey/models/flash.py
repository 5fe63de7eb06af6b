"""Attention over streams by the kernels of the package flash-attn.

They take rows of queries and rows of keys end to end, each pair of any two lengths: the last query of a row
sees all of its keys, and each one before it one key less. So a segment's queries go with the keys of what it
grows from and its own behind them. This is the one module that imports the package; the plan has found it
before weights are loaded.

Axes: H query heads, K key heads, T tokens of the stream, L keys of all rows, D head width, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_.stream import MaskedRows
from covey.kernels.upload import upload
from covey.models.attention import StreamLayout
from covey.models.prefix import Prefix
from covey.types import StreamSegment

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_WIDTH = 256


class FlashLayout:
    """The attention of one stream. Sinks, float32 and heads over 256 wide take masked rows."""

    def __init__(
        self,
        segments: Sequence[StreamSegment],
        device: torch.device | str,
        prefix: Prefix | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self._device, self._prefix = device, prefix
        self._first = 0 if prefix is None else prefix.first
        seen = zip(segments, _seen(segments), strict=True)
        rows = [(s.length, keys) for s, keys in seen if s.start >= self._first]
        self._query_ends, self._longest_query = self._rows([length for length, _ in rows])
        self._key_ends, self._longest_key = self._rows([len(keys) for _, keys in rows])
        # Packed rows see their own tokens, which lie as the kernels want them.
        is_shared = self._first > 0 or any(s.parent is not None for s in segments)
        key_L = np.concatenate([keys for _, keys in rows])
        self._key_L = upload(key_L, device) if is_shared else None
        self._masked: StreamLayout | None = None

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, T, D) of every segment."""
        if (
            options.sinks_H is not None
            or query_1HTD.dtype not in _DTYPES
            or query_1HTD.shape[-1] > _MAX_WIDTH
            or query_1HTD.shape[-1] != value_1KTD.shape[-1]
        ):
            return self._by_rows().attend(layer, query_1HTD, key_1KTD, value_1KTD, options)
        from flash_attn import flash_attn_varlen_func

        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        if self._prefix is not None:
            key_TKD, value_TKD = self._prefix.pair(layer, key_TKD, value_TKD, extends=self._first > 0)
        if self._key_L is not None:
            key_TKD, value_TKD = (x.index_select(0, self._key_L) for x in (key_TKD, value_TKD))
        window = options.sliding_window
        out_THD: Tensor = flash_attn_varlen_func(
            query_THD,
            key_TKD,
            value_TKD,
            cu_seqlens_q=self._query_ends,
            cu_seqlens_k=self._key_ends,
            max_seqlen_q=self._longest_query,
            max_seqlen_k=self._longest_key,
            dropout_p=options.dropout,
            softmax_scale=options.scaling,
            causal=True,
            # Both ends count: a window of one key reaches 0 back.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
        )
        return out_THD.transpose(0, 1)[None]

    def _rows(self, lengths: Sequence[int]) -> tuple[Tensor, int]:
        """Where rows begin and end, int32 (S + 1,), and the length of the longest."""
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return upload(ends, self._device), max(lengths)

    def _by_rows(self) -> StreamLayout:
        if self._masked is None:
            rows = MaskedRows(self.segments, self._first, self._device)
            self._masked = StreamLayout(self.segments, self._device, self._prefix, rows)
            self._masked.first = self._first
        return self._masked


def _seen(segments: Sequence[StreamSegment]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The tokens that each segment's last one sees, from the first of its root on."""
    found: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for segment in segments:
        own = np.arange(segment.start, segment.start + segment.length)
        found.append(own if segment.parent is None else np.concatenate([found[segment.parent], own]))
    return found
