"""Sends each row once, as tensors, from the rank that collected it to the rank that forwards it.

R  rows of the rollout
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.comm import Comm, raise_on_all_ranks
from covey.errors import GuardStop
from covey.media_positions import fits
from covey.rollout.exchange import as_bytes, stop
from covey.rollout.moving_media import packed_media, unpacked_media
from covey.texts import tr
from covey.types import KeptSets, Medium, SequenceSummary, TokenSequence
from covey.types.kept import bitmap_words

# Bytes in front of the rows: two numbers of 4 and two of 8.
_HEAD = 24


def move(
    held: Mapping[int, TokenSequence],
    known: Sequence[TokenSequence | SequenceSummary],
    owner_R: NDArray[np.int64],
    rank_of_R: NDArray[np.int64],
    comm: Comm,
    prompt_media: Sequence[tuple[Medium, ...]] | None = None,
) -> dict[int, TokenSequence]:
    """Return the rows that this rank is to forward, by number, in order. Collective.

    `held` has the rows that this rank owns, by their number in `known`; those that stay come back as they
    are, and those that leave are read once. `rank_of_R` says which rank forwards each row: its owner, or the
    one that it is sent to. Rows of no tokens are not sent. A row that arrives has lost who wrote each of its
    tokens behind the prompt: all of them count as the model's. `prompt_media` are the images of the prompt of
    each row, as every rank knows them (None: there are none); of those in its row, others alone are sent.

    What arrives is held to what is known of it, and kept sets to the tokens that were drawn from them. Raises
    GuardStop on every rank: F122 where a rank did not send exactly the rows that were asked of it, F110 where
    a row is not the one that was reported.
    """
    has_tokens_R = np.array([sequence.length > 0 for sequence in known], dtype=np.bool_)
    images = [()] * len(known) if prompt_media is None else prompt_media

    def numbers(owner: int, rank: int) -> list[int]:
        return np.flatnonzero(has_tokens_R & (owner_R == owner) & (rank_of_R == rank)).tolist()

    to_rank = [
        _pack(_present(held, numbers(comm.rank, rank) if rank != comm.rank else ()), images)
        for rank in range(comm.world)
    ]
    mine = _present(held, numbers(comm.rank, comm.rank))
    found: list[tuple[int, TokenSequence]] = []
    error: GuardStop | None = None
    try:
        for rank, data in enumerate(comm.swap_tensors(to_rank)):
            rows = mine if rank == comm.rank else _unpack(data, known, images)
            asked = numbers(rank, comm.rank)
            if rows is None or [number for number, _ in rows] != asked:
                raise _other_rows(asked, rows, rank, comm)
            if rank != comm.rank:
                for number, row in rows:
                    _check(number, row, known[number], rank, comm)
            check_sets(rows, comm)
            found += rows
    except GuardStop as raised:
        error = raised
    raise_on_all_ranks(comm, error)
    return dict(sorted(found, key=itemgetter(0)))


def _present(held: Mapping[int, TokenSequence], numbers: Sequence[int]) -> list[tuple[int, TokenSequence]]:
    """Return the held rows of these numbers; the receiving rank reports a number that has no row."""
    return [(number, held[number]) for number in numbers if number in held]


def _pack(rows: Sequence[tuple[int, TokenSequence]], images: Sequence[tuple[Medium, ...]]) -> Tensor:
    """Rows as bytes: how many, the vocabulary of their kept sets (0: none has sets), and how many bytes of
    `packed_media` come last; of each its number, tokens, trained ones and runs of versions; then field after
    field, each of all rows, the widest first, so that every field is aligned. With sets one is how many each
    row has (-1: none)."""
    if not rows:
        return torch.empty(0, dtype=torch.uint8)
    only = [row for _, row in rows]
    sizes = [(number, row.length, row.num_trained, len(row.versions)) for number, row in rows]
    runs = [run for row in only for run in row.versions]
    num_sets = [-1 if row.kept is None else len(row.kept) for row in only]
    sets = [row.kept for row in only if row.kept is not None]
    (vocab,) = {kept.vocab for kept in sets} or {0}
    kept = (np.array(num_sets), *(own.counts for own in sets), *(own.words for own in sets)) if sets else ()
    words, files = packed_media({number: row.media for number, row in rows}, images)
    parts = (
        *_as_type("<i4", np.array([len(rows), vocab])),
        *_as_type("<i8", np.array([len(words), len(files)])),
        *_as_type("<i4", np.array(sizes).T),
        *_as_type("<i8", np.array([version for version, _ in runs])),
        *_as_type("<i4", np.array([count for _, count in runs]), *(row.token_ids for row in only)),
        *_as_type("<f4", *(row.logprobs for row in only)),
        *_as_type("<i4", *kept),
        np.packbits(np.concatenate([row.is_trained for row in only])),
        *(np.frombuffer(part, np.uint8) for part in (words, files)),
    )
    return torch.from_numpy(np.concatenate([as_bytes(part) for part in parts]))


def _as_type(dtype: str, *parts: NDArray[Any]) -> list[NDArray[Any]]:
    return [np.asarray(part, dtype=dtype) for part in parts]


def _unpack(
    data: Tensor,
    known: Sequence[TokenSequence | SequenceSummary],
    images: Sequence[tuple[Medium, ...]],
) -> list[tuple[int, TokenSequence]] | None:
    """Return the packed rows as views of the bytes; None where sizes and bytes do not match, or a number is
    that of no row."""
    memory, at = data.numpy(), 0
    if not memory.size:
        return []

    def take(counts: Sequence[int], dtype: str) -> list[NDArray[Any]]:
        nonlocal at
        flat = memory[at : at + sum(counts) * np.dtype(dtype).itemsize].view(dtype)
        at += flat.nbytes
        return np.split(flat, np.cumsum(counts)[:-1])

    if len(memory) < _HEAD:
        return None
    (num_rows, vocab), media_sizes = (take([2], kind)[0].tolist() for kind in ("<i4", "<i8"))
    if not 0 < num_rows <= (len(memory) - at) // 16:
        return None
    numbers, lengths, trained, runs = (column.tolist() for column in take([num_rows] * 4, "<i4"))
    num_bits = -(-sum(lengths) // 8)
    num_kept = len(memory) - at - 12 * sum(runs) - 4 * (sum(lengths) + sum(trained))
    num_kept -= num_bits + sum(media_sizes)
    if min(num_kept, *media_sizes, *lengths, *trained, *runs) < 0 or not set(numbers) <= {*range(len(known))}:
        return None
    versions, counts, ids = take(runs, "<i8"), take(runs, "<i4"), take(lengths, "<i4")
    logprobs = take(trained, "<f4")
    sets = _unpack_sets(memory[at : at + num_kept], vocab, num_rows)
    if sets is None:
        return None
    at += num_kept
    bits = np.unpackbits(memory[at : at + num_bits], count=sum(lengths)).view(np.bool_)
    masks = np.split(bits, np.cumsum(lengths)[:-1])
    at += num_bits
    words, files = (part.tobytes() for part in take(media_sizes, "u1"))
    media = unpacked_media(words, files, images)
    return [
        (
            number,
            TokenSequence.behind(
                known[number].prompt_length,
                token_ids=ids[i],
                is_trained=masks[i],
                logprobs=logprobs[i],
                versions=tuple(zip(versions[i].tolist(), counts[i].tolist(), strict=True)),
                kept=sets[i],
                media=media.get(number, images[number]),
            ),
        )
        for i, number in enumerate(numbers)
    ]


def _unpack_sets(memory: NDArray[np.uint8], vocab: int, num_rows: int) -> list[KeptSets | None] | None:
    """Return the kept sets of each row, None for one without; None where counts and bytes do not match."""
    if not vocab:
        return None if len(memory) else [None] * num_rows
    if vocab < 0 or len(memory) % 4 or len(memory) < 4 * num_rows:
        return None
    num_sets, rest = np.split(memory.view("<i4"), [num_rows])
    sizes = np.maximum(num_sets, 0, dtype=np.int64)
    counts, words = np.split(rest, [min(int(sizes.sum()), len(rest))])
    widths = np.minimum(counts, bitmap_words(vocab))
    is_whole = len(counts) == sizes.sum() and widths.sum(dtype=np.int64) == len(words)
    if not is_whole or (counts < 0).any():
        return None
    parts = KeptSets(vocab=vocab, counts=counts, words=words).split(sizes.tolist())
    return [own if num >= 0 else None for own, num in zip(parts, num_sets.tolist(), strict=True)]


def _other_rows(
    asked: Sequence[int], rows: Sequence[tuple[int, TokenSequence]] | None, rank: int, comm: Comm
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


def check_sets(rows: Iterable[tuple[int, TokenSequence]], comm: Comm) -> None:
    """Raise GuardStop (F110) where a row's kept sets are not those that its tokens were drawn from."""
    for number, row in rows:
        if what := _wrong_sets(row):
            seen = tr("row {number} of the rollout has {what}", number=number, what=what)
            raise stop(
                "F110",
                comm.activity.step,
                seen,
                tr("The engine recorded what filters kept for other tokens."),
            )


def check_bans(rows: Iterable[tuple[int, TokenSequence]], banned: Sequence[int], comm: Comm) -> None:
    """Raise GuardStop (F110) on every rank where one of them trains a token that the model bans. Collective.

    Such a token has no probability, and so no gradient that means anything.
    """
    error: GuardStop | None = None
    for number, row in rows if banned else ():
        found = row.trained_ids[np.isin(row.trained_ids, banned)].tolist()
        if found and error is None:
            seen = tr(
                "row {number} of the rollout trains token {token}, which is never to be sampled "
                "(suppress_tokens of generation_config.json, or a token that stands for an image)",
                number=number,
                token=found[0],
            )
            error = stop(
                "F110", comm.activity.step, seen, tr("The tokens were sampled by a model that bans others.")
            )
    raise_on_all_ranks(comm, error)


def _wrong_sets(row: TokenSequence) -> str:
    """Describe what is wrong with a row's kept sets; "" if nothing is."""
    if row.kept is None:
        return ""
    if len(row.kept) != row.num_trained:
        return tr(
            "records of what filters kept for {num} of its {num_trained} sampled tokens",
            num=len(row.kept),
            num_trained=row.num_trained,
        )
    if lacking := row.kept.lacks(row.trained_ids):
        return tr(
            "{num} sampled tokens that are not among those that filters kept for them; the first is trained "
            "token {first}",
            num=len(lacking),
            first=lacking[0],
        )
    return ""


def _check(
    number: int, row: TokenSequence, known: TokenSequence | SequenceSummary, rank: int, comm: Comm
) -> None:
    """Raise GuardStop (F110) where a row is not the one that was reported."""
    if (row.length, row.num_trained) != (known.length, known.num_trained):
        what = tr(
            "{length} tokens, {num_trained} of them trained, instead of {planned} and {planned_trained}",
            length=row.length,
            num_trained=row.num_trained,
            planned=known.length,
            planned_trained=known.num_trained,
        )
    elif {int(row.is_trained.sum()), sum(count for _, count in row.versions)} != {known.num_trained}:
        what = tr("a mask or versions for another number of trained tokens")
    elif (row.oldest_version, row.newest_version) != (known.oldest_version, known.newest_version):
        what = tr("tokens of other policy versions")
    elif row.digest != known.digest:
        what = tr("other tokens of the same number")
    elif row.prompt_digest != known.prompt_digest or not fits(row.token_ids, row.media):
        what = tr("another prompt, or other images")
    elif not np.isclose(row.logprob_sum, known.logprob_sum, rtol=1e-9, atol=0.0, equal_nan=True):
        what = tr(
            "logprobs that add up to {sum:.6g} instead of {planned_sum:.6g}",
            sum=row.logprob_sum,
            planned_sum=known.logprob_sum,
        )
    elif (row.kept_words, row.kept_checksum) != (known.kept_words, known.kept_checksum):
        what = tr("the same tokens, but other records of what filters kept for them")
    else:
        return
    seen = tr(
        "rank {rank} reported row {number} of the rollout and sent something else for it: {what}",
        rank=comm.first_rank + rank,
        number=number,
        what=what,
    )
    raise stop("F110", comm.activity.step, seen, tr("Completions were sorted into the wrong rows."))
