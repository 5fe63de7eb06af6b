"""Attention over streams, through transformers' attention interface.

A stream is one row of tokens made of segments: a segment sees itself causally and all of its ancestors.
Packed rows are segments without a parent; completions that share a prompt are segments that grow from it, and
from what they begin with in common. The layout is a forward argument (`covey_layout`) and not a global: with
activation checkpointing the forward runs again, later and on another thread.

Axes: R rows of a bucket, H query heads, K key heads, Q queries, L keys, D head width, T tokens of the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from covey.errors import CoveyError
from covey.models import attention_native
from covey.models.prefix import Prefix
from covey.models.upload import upload
from covey.types import StreamSegment

ATTENTION_NAME = "covey"


class LayoutLostError(CoveyError):
    """A model whose layers do not hand the layout of the rows on to their attention."""


# A bucket may compute this many times the query-key cells that its rows need, before another bucket is
# opened.
_MAX_BUCKET_WASTE = 1.35
# Rows shorter than this share a bucket whatever the waste: a kernel call costs more than the padding.
_SMALL_CELLS = 4096
# Queries of a piece: a segment of twice as many is cut.
_PIECE = 256
# Scores of all rows and heads up to which plain attention is taken for such rows: 32 MiB in float32.
_MANY_CELLS = 1 << 23


class Layout(Protocol):
    """What the registered attention function needs of a `covey_layout` argument."""

    def attend(
        self,
        layer: int,
        query_1HTD: Tensor,
        key_1KTD: Tensor,
        value_1KTD: Tensor,
        options: AttentionOptions,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer asks of its attention beyond queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0


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
        and cells <= _SMALL_CELLS
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


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments computed by one kernel call, padded to a common number of queries and keys."""

    query_RQ: Tensor
    key_RL: Tensor
    is_visible_R1QL: Tensor
    age_R1QL: Tensor  # query position less key position; what a sliding window is compared with
    is_causal: bool  # no parent: plain causal attention, as padding is behind a row's own tokens


class StreamLayout:
    """The attention of one stream, planned once and used by every layer.

    `segments` cover the stream in order without gaps. Segments of similar size share a bucket: their queries
    and keys are gathered into padded rows, so that a step costs a few kernel calls and not one per segment.
    `rows` computes the attention of a bucket. With a `prefix` the stream is either that prompt alone, whose
    keys and values are kept, or goes on from it: the tokens of the first segment are then in keys and values
    only. Plain attention is computed by the `library` in place of all that, where it serves the heads.
    """

    def __init__(
        self,
        segments: Sequence[StreamSegment],
        device: torch.device | str = "cpu",
        rows: RowAttention = attend_masked,
        prefix: Prefix | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self.prefix = prefix
        self.first = 0 if prefix is None else prefix.first
        self._library = library
        self._rows, self._device = rows, device
        self._biases: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    @cached_property
    def _families(self) -> attention_native.Families:
        return attention_native.Families.of(self.segments)

    @cached_property
    def _planned(self) -> tuple[list[_Bucket], Tensor]:
        """The buckets, and the place of every token among their rows; made when something reads them."""
        is_cpu = torch.device(self._device).type == "cpu"
        first = self.first
        pieces = [piece for piece in _pieces(self.segments) if piece.segment.start >= first]
        buckets = _plan_buckets(pieces, _SMALL_CELLS if is_cpu else 0)
        total = sum(segment.length for segment in self.segments)
        restore_T = upload(_restore_index(total, buckets)[first:], self._device)
        return [_build_bucket(pieces, first, self._device) for pieces in buckets], restore_T

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
        return self._attend(layer, query_THD, key_TKD, value_TKD, options).transpose(0, 1)[None]

    def attend_heads(self, layer: int, heads_TXD: Tensor, queries: int, scaling: float) -> Tensor:
        """The same as (T, H, D), for plain attention of `queries` heads with the keys and values behind
        them."""
        keys = (heads_TXD.shape[1] - queries) // 2
        query_THD, key_TKD, value_TKD = heads_TXD.split([queries, keys, keys], dim=1)
        return self._attend(layer, query_THD, key_TKD, value_TKD, AttentionOptions(scaling=scaling))

    def _attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, options: AttentionOptions
    ) -> Tensor:
        outputs = []
        if self.prefix is not None:
            key_TKD, value_TKD = self.prefix.pair(layer, key_TKD, value_TKD, extends=self.first > 0)
        if self._library is not None and self._is_compiled(self._library, query_THD, value_TKD, options):
            given = self._library, self._families, options.scaling
            return attention_native.Attend.apply(*given, query_THD, key_TKD, value_TKD)  # type: ignore[no-any-return]
        buckets, restore_T = self._planned
        for number, bucket in enumerate(buckets):
            out_RHQD = self._rows(
                _gather(query_THD, bucket.query_RQ),
                _gather(key_TKD, bucket.key_RL),
                _gather(value_TKD, bucket.key_RL),
                self._bias(number, options.sliding_window, query_THD.dtype),
                options,
            )
            outputs.append(out_RHQD.transpose(1, 2).flatten(0, 1))
        flat_XHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat_XHD.index_select(0, restore_T)

    def _is_compiled(
        self, library: ctypes.CDLL, query_THD: Tensor, value_TKD: Tensor, options: AttentionOptions
    ) -> bool:
        """Whether the library computes it: plain attention, also where a window holds the whole stream."""
        window = options.sliding_window
        if options.softcap is not None or options.sinks_H is not None or options.dropout > 0:
            return False
        if window is not None and window < self._families.longest:
            return False
        return attention_native.serves(library, self._families, query_THD, value_TKD)

    def _bias(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to a bucket's scores, 0 or -inf: made once for all layers, and kept once for all of
        them by autograd. None where the kernel's own causal mask is the same."""
        bucket = self._planned[0][number]
        if bucket.is_causal and window is None:
            return None
        key = number, window, dtype
        if key not in self._biases:
            visible = bucket.is_visible_R1QL
            if window is not None:
                visible = visible & (bucket.age_R1QL < window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._biases[key] = bias.masked_fill_(~visible, float("-inf"))
        return self._biases[key]


def _gather(source_THD: Tensor, index_RQ: Tensor) -> Tensor:
    rows, width = index_RQ.shape
    return source_THD.index_select(0, index_RQ.flatten()).unflatten(0, (rows, width)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some queries of a segment, from token `first` of it on, and what they may see: its ancestors from the
    root on, of `before` tokens, and its own tokens up to the last of them."""

    segment: StreamSegment
    ancestors: tuple[StreamSegment, ...]
    before: int
    first: int
    queries: int

    @property
    def keys(self) -> int:
        """Tokens that the last query sees."""
        return self.before + self.first + self.queries

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries, self.keys


def _pieces(segments: Sequence[StreamSegment]) -> list[_Piece]:
    """Segments in order; a long one behind a parent is cut, as its first queries see few of its keys."""
    found = []
    paths: list[tuple[StreamSegment, ...]] = []
    for segment in segments:
        ancestors = () if segment.parent is None else (*paths[segment.parent], segments[segment.parent])
        paths.append(ancestors)
        before = sum(ancestor.length for ancestor in ancestors)
        step = _PIECE if ancestors and segment.length >= 2 * _PIECE else segment.length
        for first in range(0, segment.length, step):
            queries = min(step, segment.length - first)
            found.append(_Piece(segment, ancestors, before, first, queries))
    return found


def _plan_buckets(pieces: Sequence[_Piece], cheap: int) -> list[list[_Piece]]:
    """Group pieces so that the padded cells stay close to the needed ones; rows of `cheap` cells or fewer
    share a bucket whatever the waste."""
    buckets: list[list[_Piece]] = []
    needed = widest = longest = 0
    has_parent = False
    for piece in sorted(pieces, key=lambda p: (p.before > 0, p.size)):
        queries, keys = piece.size
        parented = piece.before > 0
        row = max(widest, queries) * max(longest, keys)
        is_cheap = row <= cheap
        if not is_cheap and buckets and parented == has_parent:
            cells = (len(buckets[-1]) + 1) * row
            is_cheap = cells <= _MAX_BUCKET_WASTE * (needed + queries * keys)
        if buckets and is_cheap:
            buckets[-1].append(piece)
            needed += queries * keys
            widest, longest, has_parent = max(widest, queries), max(longest, keys), parented
            continue
        buckets.append([piece])
        needed, widest, longest, has_parent = queries * keys, queries, keys, parented
    return buckets


def _build_bucket(pieces: Sequence[_Piece], first: int, device: torch.device | str) -> _Bucket:
    num_queries = max(piece.queries for piece in pieces)
    num_keys = max(piece.keys for piece in pieces)
    query = np.zeros((len(pieces), num_queries), dtype=np.int64)
    key = np.zeros((len(pieces), num_keys), dtype=np.int64)
    query_position = np.zeros((len(pieces), num_queries), dtype=np.int64)
    key_length = np.zeros((len(pieces), 1), dtype=np.int64)
    for row, piece in enumerate(pieces):
        own = np.arange(piece.segment.start, piece.segment.start + piece.first + piece.queries)
        position = 0
        for ancestor in piece.ancestors:
            end = position + ancestor.length
            key[row, position:end] = np.arange(ancestor.start, ancestor.start + ancestor.length)
            position = end
        query[row, : piece.queries] = own[piece.first :] - first
        query_position[row, : piece.queries] = np.arange(piece.before + piece.first, piece.keys)
        key[row, piece.before : piece.keys] = own
        key_length[row] = piece.keys
    key_position = np.arange(num_keys)
    age = query_position[:, :, None] - key_position
    # A padded query has position 0 and so sees the row's first key: no row of the softmax is ever empty.
    visible = (age >= 0) & (key_position < key_length)[:, None, :]
    # Short padded rows on a CPU have a faster way than the fused kernel, which takes a mask.
    is_even = all(piece.queries == num_queries for piece in pieces)
    has_short_way = torch.device(device).type == "cpu" and num_queries * num_keys <= _SMALL_CELLS
    is_causal = all(piece.before == 0 for piece in pieces) and (is_even or not has_short_way)

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        return upload(array, device)

    return _Bucket(tensor(query), tensor(key), tensor(visible[:, None]), tensor(age[:, None]), is_causal)


def _restore_index(total: int, buckets: Sequence[Sequence[_Piece]]) -> np.ndarray[Any, Any]:
    restore = np.empty(total, dtype=np.int64)
    offset = 0
    for pieces in buckets:
        width = max(piece.queries for piece in pieces)
        for piece in pieces:
            start = piece.segment.start + piece.first
            restore[start : start + piece.queries] = np.arange(offset, offset + piece.queries)
            offset += width
    return restore


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
