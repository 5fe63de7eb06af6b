"""Sends each row once, as tensors, from the rank that collected it to the rank that forwards it.

L  tokens of a row      N  trained ones      V  runs of one policy version      R  rows of the rollout
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.comm import Comm, raise_on_all_ranks
from covey.errors import GuardStop
from covey.rollout.exchange import Summaries, as_bytes, digest_of, stop
from covey.texts import tr


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Holds the tokens of one sequence: L tokens, N of them trained, V runs of versions.

    `version_V` int64 and `count_V` int32 are runs over the trained tokens: so many of them, one after the
    other, were sampled by this policy version. `columns` are further float32 (N,), by name.
    """

    token_ids_L: NDArray[np.int32]
    is_trained_L: NDArray[np.bool_]
    logprob_N: NDArray[np.float32]
    version_V: NDArray[np.int64]
    count_V: NDArray[np.int32]
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def move(
    held: Mapping[int, TokenRow],
    summaries: Summaries,
    rank_of_R: NDArray[np.int64],
    comm: Comm,
    columns: Sequence[str] = (),
) -> dict[int, TokenRow]:
    """Return the rows that this rank is to forward, by number, in order. Collective.

    `held` has the rows that this rank owns, by their number in `summaries`; those that stay come back as they
    are, and those that leave are read once. `rank_of_R` says which rank forwards each row: its owner, or the
    one that it is sent to, with the named `columns`. Rows of no tokens are nowhere.

    What arrives is held to its records. Raises GuardStop on every rank: F122 where a rank did not send
    exactly the rows that were asked of it, F110 where a row is not the one that was reported.
    """
    owner_R, has_tokens_R = summaries.rows["owner"], summaries.rows["length"] > 0

    def numbers(owner: int, rank: int) -> list[int]:
        return np.flatnonzero(has_tokens_R & (owner_R == owner) & (rank_of_R == rank)).tolist()

    to_rank = [
        _pack(_present(held, numbers(comm.rank, rank) if rank != comm.rank else ()), columns)
        for rank in range(comm.world)
    ]
    mine = _present(held, numbers(comm.rank, comm.rank))
    found: list[tuple[int, TokenRow]] = []
    error: GuardStop | None = None
    try:
        for rank, data in enumerate(comm.swap_tensors(to_rank)):
            rows = mine if rank == comm.rank else _unpack(data, columns)
            asked = numbers(rank, comm.rank)
            if rows is None or [number for number, _ in rows] != asked:
                raise _other_rows(asked, rows, rank, comm)
            if rank != comm.rank:
                for number, row in rows:
                    _check(row, summaries.rows[number], rank, comm)
            found += rows
    except GuardStop as raised:
        error = raised
    raise_on_all_ranks(comm, error)
    return dict(sorted(found, key=itemgetter(0)))


def _present(held: Mapping[int, TokenRow], numbers: Sequence[int]) -> list[tuple[int, TokenRow]]:
    """Return the held rows of these numbers; the receiving rank reports a number that has no row."""
    return [(number, held[number]) for number in numbers if number in held]


def _pack(rows: Sequence[tuple[int, TokenRow]], columns: Sequence[str]) -> Tensor:
    """Rows as bytes: how many; of each its number, tokens, trained ones and runs; then field after field,
    each of all rows, the widest first, so that every field is aligned."""
    if not rows:
        return torch.empty(0, dtype=torch.uint8)
    sizes = [(n, len(r.token_ids_L), len(r.logprob_N), len(r.version_V)) for n, r in rows]
    only = [row for _, row in rows]
    fields = (
        np.array([len(rows)], dtype="<i8"),
        np.array(sizes, dtype="<i4").T,
        _join((r.version_V for r in only), "<i8"),
        _join((r.count_V for r in only), "<i4"),
        _join((r.token_ids_L for r in only), "<i4"),
        _join((r.logprob_N for r in only), "<f4"),
        *(_join((r.columns[name] for r in only), "<f4") for name in columns),
        np.packbits(_join((r.is_trained_L for r in only), "?")),
    )
    return torch.from_numpy(np.concatenate([as_bytes(part) for part in fields]))


def _join(parts: Iterable[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def _unpack(data: Tensor, columns: Sequence[str]) -> list[tuple[int, TokenRow]] | None:
    """Return the packed rows as views of the bytes; None where sizes and bytes do not match."""
    memory, at = data.numpy(), 0
    if not memory.size:
        return []

    def take(counts: Sequence[int], dtype: str) -> list[NDArray[Any]]:
        nonlocal at
        flat = memory[at : at + sum(counts) * np.dtype(dtype).itemsize].view(dtype)
        at += flat.nbytes
        return np.split(flat, np.cumsum(counts)[:-1])

    num_rows = int(memory[:8].view("<i8")[0])
    at = 8
    numbers, lengths, trained, runs = (column.tolist() for column in take([num_rows] * 4, "<i4"))
    num_bits = -(-sum(lengths) // 8)
    per_trained = 4 * (1 + len(columns))
    if len(memory) - at != 12 * sum(runs) + 4 * sum(lengths) + per_trained * sum(trained) + num_bits:
        return None
    versions, counts, ids = take(runs, "<i8"), take(runs, "<i4"), take(lengths, "<i4")
    logprobs = take(trained, "<f4")
    named = [take(trained, "<f4") for _ in columns]
    bits = np.unpackbits(memory[at:], count=sum(lengths)).view(np.bool_)
    masks = np.split(bits, np.cumsum(lengths)[:-1])
    return [
        (
            number,
            TokenRow(
                token_ids_L=ids[i],
                is_trained_L=masks[i],
                logprob_N=logprobs[i],
                version_V=versions[i],
                count_V=counts[i],
                columns={name: own[i] for name, own in zip(columns, named, strict=True)},
            ),
        )
        for i, number in enumerate(numbers)
    ]


def _other_rows(
    asked: Sequence[int], rows: Sequence[tuple[int, TokenRow]] | None, rank: int, comm: Comm
) -> GuardStop:
    seen = tr(
        "rank {rank} was to have {num_asked} rows for rank {own}, but had {num_had}, {num_right} of them "
        "right",
        rank=comm.first_rank + rank,
        own=comm.first_rank + comm.rank,
        num_asked=len(asked),
        num_had=len(rows or ()),
        num_right=len({number for number, _ in rows or ()} & set(asked)),
    )
    return stop("F122", comm.activity.step, seen, tr("Completions were lost or added after sampling."))


def _check(row: TokenRow, record: NDArray[Any], rank: int, comm: Comm) -> None:
    """Raise GuardStop (F110) where a row is not the one of its record."""
    versions = row.version_V.tolist() or [-1]
    length, num_trained = int(record["length"]), int(record["num_trained"])
    if (len(row.token_ids_L), len(row.logprob_N)) != (length, num_trained):
        what = tr(
            "{length} tokens, {num_trained} of them trained, instead of {planned} and {planned_trained}",
            length=len(row.token_ids_L),
            num_trained=len(row.logprob_N),
            planned=length,
            planned_trained=num_trained,
        )
    elif int(row.is_trained_L.sum()) != num_trained or int(row.count_V.sum()) != num_trained:
        what = tr("a mask or versions for another number of trained tokens")
    elif (min(versions), max(versions)) != (int(record["oldest_version"]), int(record["newest_version"])):
        what = tr("tokens of other policy versions")
    elif digest_of(row.token_ids_L[int(record["prompt_length"]) :]) != int(record["digest"]):
        what = tr("other tokens of the same number")
    else:
        return
    seen = tr(
        "rank {rank} reported completion {episode} and sent something else for it: {what}",
        rank=comm.first_rank + rank,
        episode=int(record["episode"]),
        what=what,
    )
    raise stop("F110", comm.activity.step, seen, tr("Completions were sorted into the wrong rows."))
