"""Attention over streams, through transformers' attention interface.

A stream is one row of tokens made of segments: a segment sees itself causally and all of its ancestors.
Packed rows are segments without a parent; completions that share a prompt are segments that grow from it, and
from what they begin with in common. The layout is a forward argument (`covey_layout`) and not a global: with
activation checkpointing the forward runs again, later and on another thread.

Axes: H query heads, K key heads, D head width, T tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from covey.errors import CoveyError
from covey.kernels.protocol import AttentionOptions, Layout, StreamAttention
from covey.kernels.torch_.stream import MaskedRows
from covey.models.prefix import Prefix
from covey.types import StreamSegment

ATTENTION_NAME = "covey"


class LayoutLostError(CoveyError):
    """A model whose layers do not hand the layout of the rows on to their attention."""


class StreamLayout:
    """The attention of one stream, planned once and used by every layer.

    `segments` cover the stream in order without gaps. With a `prefix` the stream is either that prompt alone,
    whose keys and values are kept, or goes on from it: the tokens of the first segment are then in keys and
    values only. `attention` computes it; without one, padded rows in torch do.
    """

    def __init__(
        self,
        segments: Sequence[StreamSegment],
        device: torch.device | str = "cpu",
        prefix: Prefix | None = None,
        attention: StreamAttention | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self.prefix = prefix
        self.first = 0 if prefix is None else prefix.first
        self._attention = attention or MaskedRows(self.segments, self.first, device)

    def attend(
        self,
        layer: int,
        query_1HTD: Tensor,
        key_1KTD: Tensor,
        value_1KTD: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention output (1, H, T, D) of every segment."""
        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        if self.prefix is not None:
            key_TKD, value_TKD = self.prefix.pair(layer, key_TKD, value_TKD, extends=self.first > 0)
        out_THD = self._attention.attend(query_THD, key_TKD, value_TKD, options)
        return out_THD.transpose(0, 1)[None]


def _interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    covey_layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for `attn_implementation="covey"`; returns (B, T, H, D) and no weights."""
    if covey_layout is None:
        raise LayoutLostError(f"{type(module).__name__} was called without the layout of its rows")
    options = AttentionOptions(
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
        dropout=dropout if module.training else 0.0,
    )
    out = covey_layout.attend(int(getattr(module, "layer_idx")), query, key, value, options)  # noqa: B009
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, _interface)
