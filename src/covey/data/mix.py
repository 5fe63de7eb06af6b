"""Several tables of rows made one, one made two, and columns renamed: pure functions, which hold no row."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covey.config.names import free_name
from covey.data.errors import DataError, nearest, nearest_name
from covey.data.lazy_rows import Changed, Picked, Row, columns_of, picked
from covey.texts import joined, tr


def mix(
    tables: Sequence[Sequence[Row]], *, seed: int, interleave_prob: Sequence[float] | None = None
) -> Sequence[Row]:
    """The sources one after the other, or chosen from by probability until the first is used up.

    A source's own order is kept: `mix([[a, b], [c]], seed=0)` is `[a, b, c]`.
    """
    if interleave_prob is None and len(tables) == 1:
        return tables[0]
    if interleave_prob is None:
        sizes = [len(table) for table in tables]
        numbers = [np.arange(size) for size in sizes]
        return Picked(
            tables, np.repeat(np.arange(len(tables)), sizes), np.concatenate([*numbers, np.arange(0)])
        )
    _check_probabilities(interleave_prob, len(tables))
    if not all(tables):
        return []
    random = np.random.Generator(np.random.PCG64(seed))
    edges = np.cumsum(interleave_prob)[:-1]
    taken = [0] * len(tables)
    tables_of, rows = array("i"), array("q")
    while True:
        source = int(np.searchsorted(edges, random.random(), side="right"))
        tables_of.append(source)
        rows.append(taken[source])
        taken[source] += 1
        if taken[source] == len(tables[source]):
            return Picked(tables, tables_of, rows)


def _check_probabilities(probabilities: Sequence[float], num_sources: int) -> None:
    if len(probabilities) != num_sources:
        raise DataError(
            tr(
                "interleave_prob has {num_probabilities} values for {num_sources} data sets: it needs one "
                "value per data set",
                num_probabilities=len(probabilities),
                num_sources=num_sources,
            ),
            option="interleave_prob",
        )
    if not all(math.isfinite(p) and p >= 0 for p in probabilities):
        raise DataError(
            tr(
                "interleave_prob must contain probabilities from 0 to 1: {probabilities}",
                probabilities=list(probabilities),
            ),
            option="interleave_prob",
        )
    total = math.fsum(probabilities)
    if abs(total - 1) > 1e-6:
        words = tr("the values of interleave_prob must sum to 1, not {total:g}", total=total)
        raise DataError(words, option="interleave_prob")


def split_rows(rows: Sequence[Row], ratio: float, *, seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Train and validation rows: a share `ratio` of them, at least one, chosen by `seed`; both in their old
    order."""
    if not 0 <= ratio < 1:
        words = tr("split_dataset_ratio is {ratio:g}: it must be a share from 0 to below 1", ratio=ratio)
        raise DataError(words, option="split_dataset_ratio")
    if ratio == 0:
        return rows, []
    if len(rows) < 2:
        raise DataError(
            tr(
                "split_dataset_ratio is {ratio:g}, but none of the {num_rows} rows can be held out",
                ratio=ratio,
                num_rows=len(rows),
            ),
            option="split_dataset_ratio",
        )
    size = min(max(1, round(len(rows) * ratio)), len(rows) - 1)
    chosen = np.random.Generator(np.random.PCG64(seed)).choice(len(rows), size, replace=False)
    is_held = np.zeros(len(rows), dtype=bool)
    is_held[chosen] = True
    return picked(rows, np.flatnonzero(~is_held).tolist()), picked(rows, np.flatnonzero(is_held).tolist())


def rename_columns(rows: Sequence[Row], names: Mapping[str, str]) -> Sequence[Row]:
    """The rows with columns renamed, old name to new.

    DataError where no row has an old name, or where a row has a new name already; its `columns` are names
    that work, if there are any.
    """
    try:
        return _with_names(rows, names)
    except DataError as error:
        error.columns = _names_that_work(rows, names)
        raise


def _with_names(rows: Sequence[Row], names: Mapping[str, str]) -> Sequence[Row]:
    names = {old: new for old, new in names.items() if old != new}
    if not names:
        return rows
    there = columns_of(rows)
    for old in names:
        if rows and old not in there:
            raise DataError(
                tr(
                    "columns renames {old!r}, but no row has this column{nearest}; the columns are: {there}",
                    old=old,
                    nearest=nearest(old, there),
                    there=joined(", ", sorted(there)),
                ),
                option="columns",
            )
    renamed = Changed(rows, lambda row, number: _renamed(row, number, names), ["renamed", names])
    renamed.columns()  # reads every row once, which may refuse one
    return renamed


def _names_that_work(rows: Sequence[Row], names: Mapping[str, str]) -> Mapping[str, str] | None:
    """The renames, with the nearest column in place of one that does not exist. Each new name occurs once,
    and columns that already have it are left out. None if that does not work."""
    there = columns_of(rows)
    near: dict[str, str] = {}
    for old, new in names.items():
        meant = old if old in there else nearest_name(old, there - set(names))
        if meant is not None and new not in near.values():
            near.setdefault(meant, new)
    taken = [new for new in near.values() if new in there and new not in near]
    freed = {**near, **{new: free_name(new, {*there, *near.values()}) for new in taken}}
    for tried in (near, freed):
        try:
            _with_names(rows, tried)
        except DataError:
            continue
        return tried or None
    return None


def _renamed(row: Row, number: int, names: Mapping[str, str]) -> Row:
    renamed: dict[str, Any] = {}
    for column, value in row.items():
        new = names.get(column, column)
        if renamed.get(new) is not None:
            if value is None:
                continue
            raise DataError(
                tr(
                    "columns gives two columns of row {number} the name {new!r}; the row has the columns "
                    "{row}",
                    new=new,
                    number=number + 1,
                    row=joined(", ", row),
                ),
                option="columns",
            )
        renamed[new] = value
    return renamed
