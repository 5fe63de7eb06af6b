"""Laying sequences out as a stream: padded rows, packed rows, or rows that share what they begin with.

Rows of one prompt are laid out as a tree (tree training): the prompt once, and behind it, once too, what
several of them go on with before they part. A hidden state follows from the tokens up to it alone, so no
value changes.

Losses see only flat vectors over trained tokens, so the three are the same thing built three ways. A token
that predicts nothing that is trained (the last of every row) is left out of the stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.models.policy import StreamKind
from covey.types import StreamSegment

_IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
_IntTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence: rows with equal `prompt_key` have equal tokens up to `prompt_length`."""

    token_ids: Sequence[int]
    is_trained: Sequence[bool]
    prompt_length: int
    prompt_key: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The tensors of a `MicroBatch` that follow from its rows alone; N is in row order, then token order, U
    in the stream's."""

    tokens_T: Tensor
    positions_T: Tensor
    segments: tuple[StreamSegment, ...]
    num_rows: int
    context_U: Tensor
    context_N: Tensor
    target_N: Tensor
    sequence_N: Tensor


@dataclass(frozen=True, slots=True)
class _Trained:
    """A row's trained tokens: their positions in the row and how many of its tokens the forward pass
    needs."""

    position_n: _IntArray
    needed: int


def _trained(row: Row) -> _Trained:
    position_n = np.flatnonzero(np.asarray(row.is_trained, dtype=bool))
    if len(position_n) and position_n[0] == 0:
        raise ValueError(
            "the first token of a sequence has nothing to be predicted from and cannot be trained"
        )
    # A row with nothing to train keeps one token, so that a stream is never empty.
    return _Trained(position_n, int(position_n[-1]) if len(position_n) else 1)


def build_stream(rows: Sequence[Row], kind: StreamKind) -> Stream:
    """Lay rows out as `kind`; every tensor is int64 on CPU.

    The stream has `num_rows` 1, except for `padded`, where rows of equal length lie end to end.
    """
    trained = [_trained(row) for row in rows]
    if kind == "padded":
        parts = _padded(rows, trained)
    elif kind == "packed":
        parts = _packed(rows, trained)
    else:
        parts = _shared(rows, trained)
    target = [np.asarray(r.token_ids)[t.position_n] for r, t in zip(rows, trained, strict=True)]
    sequence = np.repeat(np.arange(len(rows)), [len(t.position_n) for t in trained])
    context_U, context_N = np.unique(np.concatenate(parts.predictors), return_inverse=True)
    return Stream(
        tokens_T=torch.from_numpy(parts.tokens_T),
        positions_T=torch.from_numpy(parts.positions_T),
        segments=tuple(parts.segments),
        num_rows=len(rows) if kind == "padded" else 1,
        context_U=torch.from_numpy(context_U),
        context_N=torch.from_numpy(context_N),
        target_N=torch.from_numpy(np.concatenate(target).astype(np.int64)),
        sequence_N=torch.from_numpy(sequence.astype(np.int64)),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    tokens_T: _IntArray
    positions_T: _IntArray
    segments: list[StreamSegment]
    predictors: list[_IntArray]


def _padded(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    width = max(t.needed for t in trained)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    predictors = []
    for i, (row, facts) in enumerate(zip(rows, trained, strict=True)):
        tokens[i, : facts.needed] = row.token_ids[: facts.needed]
        predictors.append(i * width + facts.position_n - 1)
    positions = np.tile(np.arange(width), len(rows))
    segments = [StreamSegment(start=i * width, length=width) for i in range(len(rows))]
    return _Parts(tokens.reshape(-1), positions, segments, predictors)


def _packed(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    tokens, positions, segments, predictors = [], [], [], []
    start = 0
    for row, facts in zip(rows, trained, strict=True):
        tokens.append(np.asarray(row.token_ids[: facts.needed], dtype=np.int64))
        positions.append(np.arange(facts.needed))
        segments.append(StreamSegment(start=start, length=facts.needed))
        predictors.append(start + facts.position_n - 1)
        start += facts.needed
    return _Parts(np.concatenate(tokens), np.concatenate(positions), segments, predictors)


def _shared(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    families: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(row.prompt_key, []).append(i)
    tokens, positions = [], []
    segments: list[StreamSegment] = []
    predictors: list[_IntArray] = [np.empty(0, dtype=np.int64)] * len(rows)
    start = 0
    for members in families.values():
        prompt_length = rows[members[0]].prompt_length
        needed_M = np.array([max(trained[i].needed, prompt_length) for i in members])
        column_L = np.arange(needed_M.max())
        is_there_ML = column_L < needed_M[:, None]
        token_ML: _IntTable = np.zeros((len(members), len(column_L)), dtype=np.int64)
        token_ML[is_there_ML] = np.concatenate(
            [rows[i].token_ids[:needed] for i, needed in zip(members, needed_M, strict=True)]
        )
        place_ML = _grow(token_ML, needed_M, prompt_length, start, segments)
        place_X = place_ML[is_there_ML] - start
        grown = int(place_X.max()) + 1
        tokens.append(np.empty(grown, dtype=np.int64))
        positions.append(np.empty(grown, dtype=np.int64))
        tokens[-1][place_X] = token_ML[is_there_ML]
        positions[-1][place_X] = np.broadcast_to(column_L, is_there_ML.shape)[is_there_ML]
        for i, place_L in zip(members, place_ML, strict=True):
            predictors[i] = place_L[trained[i].position_n - 1]
        start += grown
    return _Parts(np.concatenate(tokens), np.concatenate(positions), segments, predictors)


def _grow(
    token_ML: _IntTable, needed_M: _IntArray, prompt_length: int, start: int, segments: list[StreamSegment]
) -> _IntTable:
    """Add the tree of rows that share a prompt, from `start` of the stream on: a branch wherever some of them
    part. Gives the place of each token in the stream."""
    place_ML = np.zeros_like(token_ML)
    needed: list[int] = needed_M.tolist()
    waiting: list[tuple[list[int], int, int | None]] = [(list(range(len(token_ML))), 0, None)]
    while waiting:
        members, first, parent = waiting.pop()
        end = prompt_length if parent is None else _parting(token_ML, needed, members, first)
        place_L = np.arange(start, start + end - first)
        for row in members:
            place_ML[row, first:end] = place_L
        segments.append(StreamSegment(start=start, length=end - first, parent=parent))
        start += end - first
        branches: dict[int, list[int]] = {}
        for row in members:
            if needed[row] > end:
                branches.setdefault(int(token_ML[row, end]), []).append(row)
        waiting += [(branch, end, len(segments) - 1) for branch in reversed(branches.values())]
    return place_ML


def _parting(token_ML: _IntTable, needed: Sequence[int], members: Sequence[int], first: int) -> int:
    """The position up to which these rows are the same, as they are up to `first`."""
    end = min(needed[row] for row in members)
    if len(members) == 1:
        return end
    differs_L = (token_ML[members[1:], first:end] != token_ML[members[0], first:end]).any(axis=0)
    return first + int(differs_L.argmax()) if differs_L.any() else end
