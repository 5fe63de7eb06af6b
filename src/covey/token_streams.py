"""Laying sequences out as a stream: padded rows, packed rows, or rows that share what they begin with.

Rows of one prompt are laid out as a tree (tree training): the prompt once, and behind it, once too, what
several of them go on with before they part. A hidden state follows from the tokens up to it alone, so no
value changes.

Losses see only flat vectors over trained tokens, so the three are the same thing built three ways. A token
that predicts nothing that is trained (the last of every row) is left out of the stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from covey.media_positions import media_stream, placeholders
from covey.types import MediaTokens, Medium, StreamSegment
from covey.types.arrays import ByValue, bools, ints

if TYPE_CHECKING:
    from covey.types.arrays import Bools, Ints

StreamKind = Literal["padded", "packed", "prefix"]

_IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
_IntTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row(ByValue):
    """Holds one sequence: rows with equal `prompt_key` have equal tokens and images up to `prompt_length`.
    `media` are its images, in the order of their placeholders."""

    token_ids: Ints
    is_trained: Bools
    prompt_length: int
    prompt_key: Hashable
    media: tuple[Medium, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        object.__setattr__(self, "is_trained", bools(self.is_trained))


def random_rows(
    families: Iterable[tuple[int, Sequence[int]]], vocab: int, *, seed: int, least: int = 0, same: int = 0
) -> list[Row]:
    """Draw rows of random ids in [least, vocab) for comparisons: `[(11, (7, 4)), (6, (9,))]` are two trained
    completions of 7 and 4 tokens behind a prompt of 11, and one of 9 behind another. Completions of the last
    prompt begin with `same` equal tokens."""
    generator, rows = torch.Generator().manual_seed(seed), []
    given = list(families)

    def drawn(length: int) -> list[int]:
        return torch.randint(least, vocab, (length,), generator=generator).tolist()

    for key, (prompt, lengths) in enumerate(given):
        shared, begin = drawn(prompt), list[int]()
        for length in lengths:
            own = begin + drawn(length - len(begin))
            begin = own[:same] if key == len(given) - 1 else []
            trained = bools([False] * prompt + [True] * length)
            rows.append(
                Row(token_ids=ints(shared + own), is_trained=trained, prompt_length=prompt, prompt_key=key)
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Holds the tensors of a `MicroBatch` that follow from its rows alone; N is in row order, then token
    order, U in the stream's. `positions_T` are (3, T) where the model gives images three."""

    tokens_T: Tensor
    positions_T: Tensor
    segments: tuple[StreamSegment, ...]
    num_rows: int
    context_U: Tensor
    context_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    media: MediaTokens | None = None


@dataclass(frozen=True, slots=True)
class _Trained:
    """Holds a row's trained tokens: their positions in the row and how many of its tokens the forward pass
    needs."""

    position_n: _IntArray
    needed: int


def _trained(row: Row) -> _Trained:
    position_n = np.flatnonzero(row.is_trained)
    if len(position_n) and position_n[0] == 0:
        raise ValueError(
            "the first token of a sequence has nothing to be predicted from and cannot be trained"
        )
    # A row with nothing to train keeps one token, so that a stream is never empty.
    return _Trained(position_n, int(position_n[-1]) if len(position_n) else 1)


def build_stream(rows: Sequence[Row], kind: StreamKind, device: torch.device | str = "cpu") -> Stream:
    """Lay rows out as `kind`; every tensor is int64. ValueError where a row has other placeholders than those
    of its images.

    The stream has `num_rows` 1, except for `padded`, where rows of equal length lie end to end.
    """
    return build_streams([rows], kind, device)[0]


def build_streams(
    passes: Sequence[Sequence[Row]], kind: StreamKind, device: torch.device | str = "cpu"
) -> list[Stream]:
    """Build the streams of several passes at once, which costs less than one after the other."""
    trained = [[_trained(row) for row in rows] for rows in passes]
    lay_out = {"padded": _padded, "packed": _packed, "prefix": _shared}[kind]
    parts = [lay_out(rows, facts) for rows, facts in zip(passes, trained, strict=True)]
    tokens, chosen = [len(p.tokens_T) for p in parts], [sum(map(len, p.predictors)) for p in parts]
    ahead = list(accumulate(tokens, initial=0))
    predictor = np.concatenate(
        [index + start for p, start in zip(parts, ahead, strict=False) for index in p.predictors]
    )
    # Contexts of all passes, in the order of their streams.
    context_U, context_N = np.unique(predictor, return_inverse=True)
    begin = np.searchsorted(context_U, ahead)
    contexts = np.diff(begin).tolist()
    of_rows = [zip(rows, facts, strict=True) for rows, facts in zip(passes, trained, strict=True)]
    target = [row.token_ids[fact.position_n] for both in of_rows for row, fact in both]
    number = [i for rows in passes for i in range(len(rows))]
    sequence = np.repeat(number, [len(fact.position_n) for facts in trained for fact in facts])

    def cut(array: _IntArray, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(device).split(list(sizes))

    tensors = zip(
        cut(np.concatenate([p.tokens_T for p in parts]), tokens),
        cut(np.concatenate([p.column_T for p in parts]), tokens),
        cut(context_U - np.repeat(ahead[:-1], contexts), contexts),
        cut(context_N - np.repeat(begin[:-1], chosen), chosen),
        cut(np.concatenate(target), chosen),
        cut(sequence, chosen),
        strict=True,
    )
    streams = [
        Stream(
            tokens_T=tokens_T,
            positions_T=positions_T,
            segments=tuple(part.segments),
            num_rows=len(rows) if kind == "padded" else 1,
            context_U=context_U,
            context_N=context_N,
            target_N=target_N,
            sequence_N=sequence_N,
        )
        for rows, part, (tokens_T, positions_T, context_U, context_N, target_N, sequence_N) in zip(
            passes, parts, tensors, strict=True
        )
    ]
    return [
        _with_media(stream, part, rows) if any(row.media for row in rows) else stream
        for stream, part, rows in zip(streams, parts, passes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Tokens of a stream with the row and the column in it that each is of, its segments, and for each row
    the places that predict its trained tokens. A token that rows share is of one of them."""

    tokens_T: _IntArray
    row_T: _IntArray
    column_T: _IntArray
    segments: list[StreamSegment]
    predictors: list[_IntArray]


def _with_media(stream: Stream, part: _Parts, rows: Sequence[Row]) -> Stream:
    """Return the stream with the images of its rows, each once, and the positions that the model gives
    them."""
    sequences = [(row.token_ids, row.media) for row in rows]
    found = media_stream(sequences, part.row_T, part.column_T, stream.tokens_T.device)
    return replace(stream, media=found.media, positions_T=found.positions_T)


def _padded(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    width = max(t.needed for t in trained)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    predictors = []
    for i, (row, facts) in enumerate(zip(rows, trained, strict=True)):
        tokens[i, : facts.needed] = row.token_ids[: facts.needed]
        predictors.append(i * width + facts.position_n - 1)
    column_T = np.tile(np.arange(width), len(rows))
    row_T = np.repeat(np.arange(len(rows)), width)
    segments = [StreamSegment(start=i * width, length=width) for i in range(len(rows))]
    return _Parts(tokens.reshape(-1), row_T, column_T, segments, predictors)


def _packed(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    tokens, columns, segments, predictors = [], [], [], []
    start = 0
    for row, facts in zip(rows, trained, strict=True):
        tokens.append(np.asarray(row.token_ids[: facts.needed], dtype=np.int64))
        columns.append(np.arange(facts.needed))
        segments.append(StreamSegment(start=start, length=facts.needed))
        predictors.append(start + facts.position_n - 1)
        start += facts.needed
    row_T = np.repeat(np.arange(len(rows)), [facts.needed for facts in trained])
    return _Parts(np.concatenate(tokens), row_T, np.concatenate(columns), segments, predictors)


def _shared(rows: Sequence[Row], trained: Sequence[_Trained]) -> _Parts:
    families: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(row.prompt_key, []).append(i)
    tokens, columns, numbers = [], [], []
    segments: list[StreamSegment] = []
    predictors: list[_IntArray] = [np.empty(0, dtype=np.int64)] * len(rows)
    start = 0
    for members in families.values():
        own, facts = [rows[i] for i in members], [trained[i] for i in members]
        build = _lay_out_row if len(members) == 1 else _lay_out_tree
        token_X, member_X, column_X, indices = build(own, facts, start, segments)
        tokens.append(token_X)
        numbers.append(np.array(members)[member_X])
        columns.append(column_X)
        for i, index_L in zip(members, indices, strict=True):
            predictors[i] = index_L[trained[i].position_n - 1]
        start += len(token_X)
    return _Parts(
        np.concatenate(tokens), np.concatenate(numbers), np.concatenate(columns), segments, predictors
    )


_Placed = tuple[_IntArray, _IntArray, _IntArray, Sequence[_IntArray]]


def _lay_out_row(
    rows: Sequence[Row], trained: Sequence[_Trained], start: int, segments: list[StreamSegment]
) -> _Placed:
    """Return tokens (X,) of the only row of a prompt, the row that each is of, its column there, and the
    index of each token of the row in the stream, where they lie from `start` on. Its segments are added to
    `segments`."""
    prompt, needed = rows[0].prompt_length, max(trained[0].needed, rows[0].prompt_length)
    segments.append(StreamSegment(start=start, length=prompt))
    if needed > prompt:
        parent = len(segments) - 1
        segments.append(StreamSegment(start=start + prompt, length=needed - prompt, parent=parent))
    column_X = np.arange(needed)
    token_X = np.asarray(rows[0].token_ids[:needed], dtype=np.int64)
    return token_X, np.zeros_like(column_X), column_X, [start + column_X]


def _lay_out_tree(
    rows: Sequence[Row], trained: Sequence[_Trained], start: int, segments: list[StreamSegment]
) -> _Placed:
    """Do the same as `_lay_out_row` for all rows of a prompt; tokens that rows share stand once."""
    prompt_length = rows[0].prompt_length
    needed_M = np.array([max(facts.needed, prompt_length) for facts in trained])
    column_L = np.arange(needed_M.max())
    is_there_ML = column_L < needed_M[:, None]
    token_ML: _IntTable = np.zeros((len(rows), len(column_L)), dtype=np.int64)
    token_ML[is_there_ML] = np.concatenate(
        [row.token_ids[:needed] for row, needed in zip(rows, needed_M, strict=True)]
    )
    place_ML = _add_segments(_told_apart(token_ML, rows), needed_M, prompt_length, start, segments)
    place_X = place_ML[is_there_ML] - start
    # Where rows share a token, any of them is named.
    member_X, column_X = np.empty((2, int(place_X.max()) + 1), dtype=np.int64)
    member_X[place_X], column_X[place_X] = np.nonzero(is_there_ML)
    return token_ML[member_X, column_X], member_X, column_X, list(place_ML)


def _told_apart(token_ML: _IntTable, rows: Sequence[Row]) -> _IntTable:
    """Return the tokens with a number of its own for each image in place of its placeholders, so that equal
    placeholders of different images differ."""
    if not any(row.media for row in rows):
        return token_ML
    numbers: dict[Medium, int] = {}
    apart_ML = token_ML.copy()
    for row, token_L in zip(rows, apart_ML, strict=True):
        numbered = [np.full(m.num_tokens, -1 - numbers.setdefault(m, len(numbers))) for m in row.media]
        place_X = placeholders(row.token_ids, row.media)
        is_within = place_X < len(token_L)
        token_L[place_X[is_within]] = np.concatenate([np.empty(0, np.int64), *numbered])[is_within]
    return apart_ML


def _add_segments(
    token_ML: _IntTable, needed_M: _IntArray, prompt_length: int, start: int, segments: list[StreamSegment]
) -> _IntTable:
    """Add the segments of a tree of rows that share a prompt, from `start` of the stream on, with a branch
    wherever rows differ. Return the index (M, L) of each token in the stream."""
    place_ML = np.zeros_like(token_ML)
    needed: list[int] = needed_M.tolist()
    waiting: list[tuple[list[int], int, int | None]] = [(list(range(len(token_ML))), 0, None)]
    while waiting:
        members, first, parent = waiting.pop()
        end = prompt_length if parent is None else _end_of_equals(token_ML, needed, members, first)
        index_L = np.arange(start, start + end - first)
        for row in members:
            place_ML[row, first:end] = index_L
        segments.append(StreamSegment(start=start, length=end - first, parent=parent))
        start += end - first
        branches: dict[int, list[int]] = {}
        for row in members:
            if needed[row] > end:
                branches.setdefault(int(token_ML[row, end]), []).append(row)
        waiting += [(branch, end, len(segments) - 1) for branch in reversed(branches.values())]
    return place_ML


def _end_of_equals(token_ML: _IntTable, needed: Sequence[int], members: Sequence[int], first: int) -> int:
    """Return the position up to which the rows `members`, which are equal up to `first`, are equal."""
    end = min(needed[row] for row in members)
    if len(members) == 1:
        return end
    differs_L = (token_ML[members[1:], first:end] != token_ML[members[0], first:end]).any(axis=0)
    return first + int(differs_L.argmax()) if differs_L.any() else end
