"""Prompts of a data set that is read as it goes and never held: for `--streaming`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from covey.data.errors import DataError
from covey.data.mix import rename_columns
from covey.data.rows import PromptOptions, PromptTable, prompt_table
from covey.data.text import TextCodec
from covey.plan.reasons import REASONS, REFUSED
from covey.texts import joined, tr
from covey.types import Origin, Prompt

BLOCK = 1_024


class StreamRows(Sequence[Mapping[str, Any]]):
    """The rows of a stream by their numbers, with renamed columns. A block of them is held; it reads on to
    rows behind it, and from the beginning to those in front of it."""

    def __init__(
        self, rows: Callable[[], Iterator[Mapping[str, Any]]], columns: Mapping[str, str] | None = None
    ) -> None:
        self._rows, self._columns = rows, dict(columns or {})
        self._behind, self._block, self._first = rows(), list[Mapping[str, Any]](), 0

    def __len__(self) -> int:
        return sum(1 for _ in self._rows())

    def __getitem__(self, number: Any) -> Any:
        if number < self._first:
            self._behind, self._block, self._first = self._rows(), [], 0
        while number >= self._first + len(self._block):
            self._first += len(self._block)
            self._block = list(islice(self._behind, BLOCK))
            if not self._block:
                raise IndexError(number)
        row = self._block[number - self._first]
        return rename_columns([row], self._columns)[0] if self._columns else row


class PromptStream:
    """The usable prompts of a stream, epoch after epoch, `per_rollout` at a time.

    Blocks of 1,024 rows are read in the order of the data and, when `shuffle`, permuted within themselves by
    (seed, epoch, block). At the end of the data the stream begins again. What a rollout takes depends on
    nothing that was asked before; going back, or far ahead, costs reading from the beginning.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[Mapping[str, Any]]],
        codec: TextCodec,
        *,
        max_length: int | None,
        options: PromptOptions,
        seed: int,
        shuffle: bool,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self._rows = rows
        self._codec = codec
        self._max_length = max_length
        self._options = options
        self._seed = seed
        self._shuffle = shuffle
        self._columns = dict(columns or {})
        self._first_read: list[Mapping[str, Any]] | None = None
        self._left_out: dict[str, int] = {}
        self._num_counted = 0
        self._position = 0
        self._prompts = self._endless()

    @property
    def left_out(self) -> Mapping[str, int]:
        """Rows left out by reason, each row counted once, among those read so far."""
        return dict(self._left_out)

    @property
    def num_rows_read(self) -> int:
        """Different rows read so far."""
        return self._num_counted

    def first_block(self) -> PromptTable:
        """The first 1,024 rows as a table: what can be known of the data before the run."""
        return self._table(self._first(), 0)

    def first_rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the first block, with their columns renamed."""
        return rename_columns(self._first(), self._columns) if self._columns else self._first()

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows by their numbers, to be read again."""
        return StreamRows(self._rows, self._columns)

    def _first(self) -> list[Mapping[str, Any]]:
        if self._first_read is None:
            self._first_read = list(islice(self._rows(), BLOCK))
        return self._first_read

    def reordered(self, seed: int) -> PromptStream:
        """The same prompts, read on their own and permuted by another seed."""
        return PromptStream(
            self._rows,
            self._codec,
            max_length=self._max_length,
            options=self._options,
            seed=seed,
            shuffle=True,
            columns=self._columns,
        )

    def take(self, rollout: int, per_rollout: int) -> list[Prompt]:
        """The prompts of a rollout, marked with the epoch in which the first of them stands."""
        start = rollout * per_rollout
        if start < self._position:
            self._prompts, self._position = self._endless(), 0
        for _ in islice(self._prompts, start - self._position):
            pass
        taken = list(islice(self._prompts, per_rollout))
        self._position = start + per_rollout
        origin = Origin(epoch=taken[0].origin.epoch, rollout=rollout)
        return [replace(prompt, origin=origin) for prompt in taken]

    def _endless(self) -> Iterator[Prompt]:
        epoch = 0
        while True:
            is_empty = True
            for prompt in self._epoch(epoch):
                is_empty = False
                yield prompt
            if is_empty:
                reasons = joined(
                    ", ", [tr("{n} {reason}", n=n, reason=reason) for reason, n in self._left_out.items()]
                )
                raise DataError(
                    tr(
                        "the stream has no usable prompt (rows left out: {reasons})",
                        reasons=reasons or tr("it contains no rows"),
                    )
                )
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Prompt]:
        origin = Origin(epoch=epoch, rollout=-1)
        rows = self._rows()
        block = 0
        while part := list(islice(rows, BLOCK)):
            table = self._table(part, block * BLOCK)
            _refuse(table)
            self._count(table, block * BLOCK + len(part))
            for number in self._order(len(table.entries), epoch, block):
                yield table.take(number, origin)
            block += 1

    def _table(self, rows: Sequence[Mapping[str, Any]], first: int) -> PromptTable:
        renamed = rename_columns(rows, self._columns) if self._columns else rows
        return prompt_table(
            renamed, self._codec, max_length=self._max_length, options=self._options, first_id=first
        )

    def _count(self, table: PromptTable, end: int) -> None:
        if end <= self._num_counted:
            return
        self._num_counted = end
        for reason, number in table.left_out.items():
            self._left_out[reason] = self._left_out.get(reason, 0) + number

    def _order(self, size: int, epoch: int, block: int) -> Sequence[int]:
        if not self._shuffle:
            return range(size)
        random = np.random.Generator(np.random.PCG64([self._seed, epoch, block]))
        return [int(i) for i in random.permutation(size)]


def _refuse(table: PromptTable) -> None:
    """Raise for a row that may not be left out, as the plan does for the rows it sees."""
    for reason, numbers in table.left_out_rows.items():
        if reason in REFUSED:
            detail = table.details.get(reason, "")
            raise DataError(
                tr(
                    "row {numbers} of the stream cannot be used ({reasons}): {detail}",
                    numbers=numbers[0] + 1,
                    reasons=REASONS[reason],
                    detail=detail,
                )
            )
