"""Attention over a stream by padded rows.

Segments of similar size share a bucket: their queries and keys are gathered into padded rows, so that a step
costs a few kernel calls and not one a segment.

Axes: R rows of a bucket, H query heads, K key heads, Q queries, L keys, D head width, T tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_.attention import SMALL_CELLS, RowAttention, attend_masked
from covey.kernels.upload import upload
from covey.types import StreamSegment

# A bucket may compute this many times the query-key cells that its rows need, before another bucket is
# opened.
_MAX_BUCKET_WASTE = 1.35
# Queries of a chunk: a segment of twice as many is cut.
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Holds segments computed by one kernel call, padded to a common number of queries and keys."""

    query_RQ: Tensor
    key_RL: Tensor
    is_visible_R1QL: Tensor
    age_R1QL: Tensor  # query position less key position; what a sliding window is compared with
    is_causal: bool  # no parent: plain causal attention, as padding is behind a row's own tokens


class MaskedRows:
    """Computes the attention of the queries from token `first` of a stream on; `rows` computes that of a
    bucket."""

    def __init__(
        self,
        segments: Sequence[StreamSegment],
        first: int,
        device: torch.device | str,
        rows: RowAttention = attend_masked,
    ) -> None:
        self._segments, self._first, self._device, self._rows = segments, first, device, rows
        self._biases: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    @cached_property
    def _planned(self) -> tuple[list[_Bucket], Tensor]:
        """Return the buckets, and where every token is among their rows; made when something reads them."""
        is_cpu = torch.device(self._device).type == "cpu"
        first = self._first
        chunks = [chunk for chunk in _chunks(self._segments) if chunk.segment.start >= first]
        buckets = _plan_buckets(chunks, SMALL_CELLS if is_cpu else 0)
        total = sum(segment.length for segment in self._segments)
        restore_T = upload(_restore_index(total, buckets)[first:], self._device)
        return [_build_bucket(chunks, first, self._device) for chunks in buckets], restore_T

    def attend(
        self, query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Compute attention as the protocol says."""
        outputs = []
        buckets, restore_T = self._planned
        for number, bucket in enumerate(buckets):
            out_RHQD = self._rows(
                _gather(query_THD, bucket.query_RQ),
                _gather(key_LKD, bucket.key_RL),
                _gather(value_LKD, bucket.key_RL),
                self._bias(number, options.sliding_window, query_THD.dtype),
                options,
            )
            outputs.append(out_RHQD.transpose(1, 2).flatten(0, 1))
        flat_XHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat_XHD.index_select(0, restore_T)

    def _bias(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to a bucket's scores, 0 or -inf; None where the kernel's own causal mask is
        the same. It is made once, and autograd keeps it once for all layers."""
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
class _Chunk:
    """Holds some queries of a segment, from token `first` of it on, and what they may see: its ancestors from
    the root on, of `before` tokens, and its own tokens up to the last of them."""

    segment: StreamSegment
    ancestors: tuple[StreamSegment, ...]
    before: int
    first: int
    queries: int

    @property
    def keys(self) -> int:
        """Return the number of tokens that the last query sees."""
        return self.before + self.first + self.queries

    @property
    def size(self) -> tuple[int, int]:
        """Return the numbers of queries and keys."""
        return self.queries, self.keys


def _chunks(segments: Sequence[StreamSegment]) -> list[_Chunk]:
    """Return the chunks of all segments in order. A long segment behind a parent is cut, as its first queries
    see few of its keys."""
    found = []
    paths: list[tuple[StreamSegment, ...]] = []
    for segment in segments:
        ancestors = () if segment.parent is None else (*paths[segment.parent], segments[segment.parent])
        paths.append(ancestors)
        before = sum(ancestor.length for ancestor in ancestors)
        step = _CHUNK if ancestors and segment.length >= 2 * _CHUNK else segment.length
        for first in range(0, segment.length, step):
            queries = min(step, segment.length - first)
            found.append(_Chunk(segment, ancestors, before, first, queries))
    return found


def _plan_buckets(chunks: Sequence[_Chunk], cheap: int) -> list[list[_Chunk]]:
    """Group chunks so that the padded cells stay close to the needed ones; rows of `cheap` cells or fewer
    share a bucket whatever the waste."""
    buckets: list[list[_Chunk]] = []
    needed = widest = longest = 0
    has_parent = False
    for chunk in sorted(chunks, key=lambda p: (p.before > 0, p.size)):
        queries, keys = chunk.size
        parented = chunk.before > 0
        row = max(widest, queries) * max(longest, keys)
        is_cheap = row <= cheap
        if not is_cheap and buckets and parented == has_parent:
            cells = (len(buckets[-1]) + 1) * row
            is_cheap = cells <= _MAX_BUCKET_WASTE * (needed + queries * keys)
        if buckets and is_cheap:
            buckets[-1].append(chunk)
            needed += queries * keys
            widest, longest, has_parent = max(widest, queries), max(longest, keys), parented
            continue
        buckets.append([chunk])
        needed, widest, longest, has_parent = queries * keys, queries, keys, parented
    return buckets


def _build_bucket(chunks: Sequence[_Chunk], first: int, device: torch.device | str) -> _Bucket:
    num_queries = max(chunk.queries for chunk in chunks)
    num_keys = max(chunk.keys for chunk in chunks)
    query = np.zeros((len(chunks), num_queries), dtype=np.int64)
    key = np.zeros((len(chunks), num_keys), dtype=np.int64)
    query_position = np.zeros((len(chunks), num_queries), dtype=np.int64)
    key_length = np.zeros((len(chunks), 1), dtype=np.int64)
    for row, chunk in enumerate(chunks):
        own = np.arange(chunk.segment.start, chunk.segment.start + chunk.first + chunk.queries)
        position = 0
        for ancestor in chunk.ancestors:
            end = position + ancestor.length
            key[row, position:end] = np.arange(ancestor.start, ancestor.start + ancestor.length)
            position = end
        query[row, : chunk.queries] = own[chunk.first :] - first
        query_position[row, : chunk.queries] = np.arange(chunk.before + chunk.first, chunk.keys)
        key[row, chunk.before : chunk.keys] = own
        key_length[row] = chunk.keys
    key_position = np.arange(num_keys)
    age = query_position[:, :, None] - key_position
    # A padded query has position 0 and so sees the row's first key: no row of the softmax is ever empty.
    visible = (age >= 0) & (key_position < key_length)[:, None, :]
    # Short padded rows on a CPU have a faster way than the fused kernel, which takes a mask.
    is_even = all(chunk.queries == num_queries for chunk in chunks)
    has_short_way = torch.device(device).type == "cpu" and num_queries * num_keys <= SMALL_CELLS
    is_causal = all(chunk.before == 0 for chunk in chunks) and (is_even or not has_short_way)

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        return upload(array, device)

    return _Bucket(tensor(query), tensor(key), tensor(visible[:, None]), tensor(age[:, None]), is_causal)


def _restore_index(total: int, buckets: Sequence[Sequence[_Chunk]]) -> np.ndarray[Any, Any]:
    restore = np.empty(total, dtype=np.int64)
    offset = 0
    for chunks in buckets:
        width = max(chunk.queries for chunk in chunks)
        for chunk in chunks:
            start = chunk.segment.start + chunk.first
            restore[start : start + chunk.queries] = np.arange(offset, offset + chunk.queries)
            offset += width
    return restore
