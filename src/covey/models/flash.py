"""Attention over packed rows by the kernels of the package flash-attn.

They take rows of any lengths end to end, and know nothing of a prompt that rows share. This is the one module
that imports the package; the plan has found it before weights are loaded.

Axes: H query heads, K key heads, T tokens of the stream, D head width, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from covey.models.attention import AttentionOptions, StreamLayout
from covey.types import StreamSegment

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_WIDTH = 256


class FlashLayout:
    """The attention of one packed stream. Sinks, float32 and heads over 256 wide take masked rows.

    Raises ValueError for a stream whose segments have parents.
    """

    def __init__(self, segments: Sequence[StreamSegment], device: torch.device | str) -> None:
        if any(s.parent is not None for s in segments):
            raise ValueError("the kernels of flash-attn cannot share a prompt between rows; pack them")
        self.segments = tuple(segments)
        self._device = device
        lengths = [s.length for s in self.segments]
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self._ends_S = torch.from_numpy(ends).to(device)
        self._longest = max(lengths)
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

        window = options.sliding_window
        out_THD: Tensor = flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD)),
            cu_seqlens_q=self._ends_S,
            cu_seqlens_k=self._ends_S,
            max_seqlen_q=self._longest,
            max_seqlen_k=self._longest,
            dropout_p=options.dropout,
            softmax_scale=options.scaling,
            causal=True,
            # Both ends count: a window of one key reaches 0 back.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
        )
        return out_THD.transpose(0, 1)[None]

    def _by_rows(self) -> StreamLayout:
        if self._masked is None:
            self._masked = StreamLayout(self.segments, self._device)
        return self._masked
