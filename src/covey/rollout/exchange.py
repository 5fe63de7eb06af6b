"""Gives every rank one record of 83 bytes for each row of a rollout; tokens stay with their owner.

A row is one sequence of an episode. Ranks collect any episodes they like; after the exchange each of them has
the records of all, in the same order.

    R  rows      K  parts of a reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.activity import ranks_word
from covey.codes import CODES
from covey.comm import Comm
from covey.errors import GuardStop
from covey.texts import joined, tr
from covey.types import Finding, Fix, SequenceSummary

SUMMARY = np.dtype(
    [
        # Policy versions of the oldest and newest trained token, in optimizer steps; -1 without one.
        ("oldest_version", "<i8"),
        ("newest_version", "<i8"),
        # The sum of the sampler's logprobs of the trained tokens, in nats.
        ("logprob_sum", "<f8"),
        # Of the tokens behind the prompt: equal completions have equal ones.
        ("digest", "<u8"),
        # Of the tokens of the prompt.
        ("prompt_digest", "<u8"),
        # The slot of the rollout that the episode fills, counted from 0, group after group.
        ("episode", "<i4"),
        # Tokens at the beginning that are the prompt's; all tokens, 0 for a slot without a sequence; trained
        # ones; sampled ids that the tokenizer has no token for.
        ("prompt_length", "<i4"),
        ("length", "<i4"),
        ("num_trained", "<i4"),
        ("num_unknown", "<i4"),
        # The words and the checksum of the sets that filters kept; -1 and 0 without filters.
        ("kept_words", "<i4"),
        ("kept_checksum", "<u4"),
        # The number of the sequence within the episode, counted from 0.
        ("row", "<i2"),
        # Turns of the model in the episode, calls of tools that it made, and those of them that failed.
        ("num_turns", "<u2"),
        ("num_calls", "<u2"),
        ("num_failed_calls", "<u2"),
        # The rank that has the tokens. `exchange` writes it.
        ("owner", "<i2"),
        # The place of the episode's outcome in its enumeration.
        ("outcome", "i1"),
        # Whether the answer was read: -1 where no reward reads one, 0 where none was found, else 1.
        ("parsed_by", "i1"),
        # Whether the completion repeats itself, whether rewards gave numbers for its steps, and whether there
        # is something to tell people of it.
        ("is_repetitive", "?"),
        ("has_steps", "?"),
        ("has_words", "?"),
    ]
)
"""The record of a row, 83 bytes."""

T = TypeVar("T")

_REPORT = Fix(text=tr("report this with the run directory: it is a bug that no configuration can cause"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """Holds the numbers that rewards gave to the steps of one row.

    `ends` (steps,), int32, is how many of the completion's tokens stand before the end of each step. `values`
    has for each part of the reward the numbers of its steps, float64, or None where it gave a single one.
    """

    ends: NDArray[np.int32]
    values: tuple[NDArray[np.float64] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """Holds the records of R rows, and the reward parts of each.

    `rows` (R,) are SUMMARY; `parts_RK` float64 the values of the reward's parts, NaN where one has none; and
    `statuses_RK` int8 the places of their statuses in the enumeration. `steps` has the step rewards of those
    rows that have some, and `words` what people are told of a row, as JSON, both by the number of the row
    here.
    """

    rows: NDArray[Any]
    parts_RK: NDArray[np.float64]
    statuses_RK: NDArray[np.int8]
    steps: Mapping[int, StepRewards] = field(default_factory=dict)
    words: Mapping[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.rows.dtype == SUMMARY and self.parts_RK.ndim == 2, "SUMMARY (R,) and parts (R, K)"
        assert self.parts_RK.shape == self.statuses_RK.shape and len(self.parts_RK) == len(self.rows)
        assert np.flatnonzero(self.rows["has_steps"]).tolist() == sorted(self.steps), "rows with steps"
        assert np.flatnonzero(self.rows["has_words"]).tolist() == sorted(self.words), "rows with words"

    def known(self, number: int) -> SequenceSummary:
        """Return the summary that every rank has of this row's sequence."""
        row = self.rows[number]
        return SequenceSummary(**{name: row[name].item() for name in SequenceSummary.__dataclass_fields__})


def as_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes (n,) of an array of any shape, in order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def exchange(own: Summaries, num_episodes: int, comm: Comm) -> Summaries:
    """Return the records of all ranks, in the order of episodes and of the rows within them. Collective.

    `own` are those of this rank's episodes, in any order; `num_episodes` is how many slots the rollout has on
    all ranks together. Every rank gives rows with the same number of parts. One tensor goes from each rank to
    each: 83 bytes a row and 9 bytes a part; a second one where any rank has step rewards, and words as JSON
    where any rank has some.

    Raises GuardStop (F122) on every rank for an episode that is unknown, one that is there twice or missing,
    and for rows that an episode has twice or lacks.
    """
    num_parts = own.parts_RK.shape[1]
    shares = [_read(share.numpy(), num_parts) for share in comm.gather_tensors(_bytes(own))]
    for rank, share in enumerate(shares):
        share.rows["owner"] = rank
    rows = np.concatenate([share.rows for share in shares])
    order = np.lexsort((rows["row"], rows["episode"]))
    _check(rows[order], num_episodes, comm)
    steps: dict[int, StepRewards] = {}
    if rows["has_steps"].any():
        every = comm.gather_tensors(_step_bytes(own))
        read = [_read_steps(part.numpy(), share) for part, share in zip(every, shares, strict=True)]
        steps = _by_number(rows["has_steps"], order, [one for of_rank in read for one in of_rank])
    words: dict[int, Any] = {}
    if rows["has_words"].any():
        told = comm.gather_json([own.words[number] for number in sorted(own.words)])
        words = _by_number(rows["has_words"], order, [one for of_rank in told for one in of_rank])
    return Summaries(
        rows=rows[order],
        parts_RK=np.concatenate([share.parts_RK for share in shares])[order],
        statuses_RK=np.concatenate([share.statuses_RK for share in shares])[order],
        steps=steps,
        words=words,
    )


def _by_number(has_R: NDArray[np.bool_], order: NDArray[np.int64], found: Sequence[T]) -> dict[int, T]:
    """Return `found`, one entry for each True of `has_R` (R,), by the row's place in `order` (R,)."""
    of_row = dict(zip(np.flatnonzero(has_R).tolist(), found, strict=True))
    return {new: of_row[old] for new, old in enumerate(order.tolist()) if old in of_row}


@dataclass(frozen=True, slots=True)
class _Share:
    """Holds the records and reward parts that one rank has sent."""

    rows: NDArray[Any]
    parts_RK: NDArray[np.float64]
    statuses_RK: NDArray[np.int8]


def _bytes(own: Summaries) -> Tensor:
    """Return records and parts as uint8 (R, bytes of a row)."""
    num_rows, num_parts = own.parts_RK.shape
    columns = (
        as_bytes(own.rows).reshape(num_rows, SUMMARY.itemsize),
        as_bytes(own.parts_RK.astype("<f8")).reshape(num_rows, 8 * num_parts),
        as_bytes(own.statuses_RK.astype("i1")).reshape(num_rows, num_parts),
    )
    return torch.from_numpy(np.concatenate(columns, axis=1))


def _read(data: NDArray[np.uint8], num_parts: int) -> _Share:
    """Read back what `_bytes` packed: records (R,), parts (R, K) and statuses (R, K)."""
    fixed, parts = SUMMARY.itemsize, SUMMARY.itemsize + 8 * num_parts
    return _Share(
        np.frombuffer(bytearray(data[:, :fixed].tobytes()), SUMMARY),
        np.frombuffer(data[:, fixed:parts].tobytes(), "<f8").reshape(len(data), num_parts),
        np.frombuffer(data[:, parts:].tobytes(), "i1").reshape(len(data), num_parts),
    )


def _step_bytes(own: Summaries) -> Tensor:
    """The step rewards of the rows that have some, in their order, uint8 (bytes,): how many ends there are of
    each row; how many values of each part (-1: a single number); the ends; the values."""
    of_rows = [own.steps[number] for number in sorted(own.steps)]
    values = [part for row in of_rows for part in row.values]
    assert len(values) == len(of_rows) * own.parts_RK.shape[1], "one entry a part"
    counts = [len(row.ends) for row in of_rows] + [-1 if part is None else len(part) for part in values]
    ends = [np.asarray(row.ends, dtype="<i4") for row in of_rows]
    flat = [np.asarray(part, dtype="<f8") for part in values if part is not None]
    chunks = [np.array(counts, dtype="<i4"), *ends, *flat]
    return torch.from_numpy(np.concatenate([as_bytes(chunk) for chunk in chunks]))


def _read_steps(data: NDArray[np.uint8], share: _Share) -> list[StepRewards]:
    """Read back the step rewards that `_step_bytes` packed on the rank of these records."""
    num_rows, num_parts = int(share.rows["has_steps"].sum()), share.parts_RK.shape[1]
    memory, at = data.tobytes(), 0

    def take(count: int, dtype: str) -> NDArray[Any]:
        nonlocal at
        found = np.frombuffer(memory, dtype, count, at).copy()
        at += found.nbytes
        return found

    num_ends = take(num_rows, "<i4").tolist()
    num_values = take(num_rows * num_parts, "<i4").reshape(num_rows, num_parts).tolist()
    ends = [take(count, "<i4") for count in num_ends]
    return [
        StepRewards(ends=own, values=tuple(None if n < 0 else take(n, "<f8") for n in counts))
        for own, counts in zip(ends, num_values, strict=True)
    ]


def _check(rows: NDArray[Any], num_episodes: int, comm: Comm) -> None:
    """Raise GuardStop (F122) where rows, in order, are not those of every episode, once each. All ranks see
    the same rows, so all of them raise."""
    episodes, number = rows["episode"], np.arange(len(rows))
    unknown = rows[(episodes < 0) | (episodes >= num_episodes)]
    is_further = np.zeros(len(rows), dtype=np.bool_)
    is_further[1:] = episodes[1:] == episodes[:-1]
    is_other = np.ones(len(rows), dtype=np.bool_)
    is_other[1:] = (rows["row"][1:] != rows["row"][:-1]) & (rows["owner"][1:] == rows["owner"][:-1])
    twice = episodes[is_further & ~is_other]
    missing = np.setdiff1d(np.arange(num_episodes), episodes)
    place = number - np.maximum.accumulate(np.where(is_further, 0, number))
    torn = episodes[rows["row"] != place]
    if len(unknown):
        seen = tr(
            "{ranks} reported completion {episode}, but the rollout has the completions 0 to {last}",
            ranks=ranks_word([comm.first_rank + int(unknown[0]["owner"])]),
            episode=int(unknown[0]["episode"]),
            last=num_episodes - 1,
        )
    elif len(twice):
        owners = np.unique(rows["owner"][episodes == twice[0]])
        seen = tr(
            "completion {episode} was reported twice, by {ranks}",
            episode=int(twice[0]),
            ranks=ranks_word([comm.first_rank + int(owner) for owner in owners]),
        )
    elif len(missing):
        seen = tr(
            "of {num_episodes} completions no rank reported {num_missing}: {listed}",
            num_missing=len(missing),
            num_episodes=num_episodes,
            listed=_listed(missing.tolist()),
        )
    elif len(torn):
        seen = tr(
            "completion {episode} lacks one of its sequences; those reported are {listed}",
            episode=int(torn[0]),
            listed=_listed(rows["row"][episodes == torn[0]].tolist()),
        )
    else:
        return
    raise stop("F122", comm.activity.step, seen, tr("Completions were lost or added after sampling."))


def _listed(numbers: Sequence[int]) -> str:
    more = [tr("and {rest} more", rest=len(numbers) - 6)] if len(numbers) > 6 else []
    return joined(", ", [*map(str, numbers[:6]), *more])


def stop(code: str, step: int, seen: str, cause: str) -> GuardStop:
    """Return the GuardStop that ends a run in which ranks contradict each other."""
    return GuardStop(
        Finding(
            code=code,
            seen=tr("step {step}: {seen}", step=step, seen=seen),
            why=CODES[code].why,
            cause=cause,
            fixes=(_REPORT,),
            step=step,
        )
    )
