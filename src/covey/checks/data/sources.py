"""Facts about the sources of the data: which rows there are, to train and to evaluate on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import exists
from pathlib import Path
from typing import Any

from covey.checks.data.faults import data_problem, hub_problem, unreadable_file
from covey.data.errors import DataError
from covey.data.lazy_rows import Changed, columns_of
from covey.data.live import LiveRows
from covey.data.mix import mix, rename_columns, split_rows
from covey.data.sources import DataSource, eval_name, load_source, parse_source
from covey.options.schema import Config
from covey.plan.facts import DataProblem, Facts, UnreadableFile
from covey.quickstart.built_in import BUILT_IN

Rows = Sequence[Mapping[str, Any]]
Live = Mapping[str, LiveRows]


class Unusable(Exception):
    """What was learnt before it turned out that the data cannot be used."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts


def with_data_problem(facts: Facts, problem: DataProblem) -> Facts:
    return replace(facts, data=replace(facts.data, problem=problem))


def sources_of(facts: Facts, texts: Sequence[str], live: Live) -> list[DataSource | str]:
    """Each argument taken apart; a built-in task stays the word that it is."""
    parsed: list[DataSource | str] = []
    for text in texts:
        try:
            source = parse_source(text)  # also of the built-in task, for what stands after its #
            parsed.append(text if _name(text) in BUILT_IN else source)
        except DataError as error:
            raise Unusable(with_data_problem(facts, data_problem(error))) from error
    missing = tuple(
        s.path for s in parsed if isinstance(s, DataSource) and s.hub == "local" and not exists(Path(s.path))
    )
    if missing:
        raise Unusable(replace(facts, data=replace(facts.data, missing_paths=missing)))
    if any(isinstance(s, DataSource) and s.hub == "object" and s.path not in live for s in parsed):
        raise Unusable(facts)  # which is said of the objects themselves
    return parsed


def _name(text: str) -> str:
    """The name of the built-in task in `quickstart#N`."""
    return text.partition("#")[0]


def _first(rows: Rows, text: str) -> Rows:
    """The rows of a built-in task that `quickstart#N` means; they lie in a random order already."""
    _, mark, number = text.partition("#")
    return rows[: int(number)] if mark else rows


def load_tables(
    facts: Facts, config: Config, sources: Sequence[DataSource | str], live: Live, *, offline: bool
) -> tuple[Facts, list[Rows]]:
    tables: list[Rows] = []
    unreadable: list[UnreadableFile] = []
    notes = list(facts.data.notes)
    for source in sources:
        if not isinstance(source, DataSource):
            tables.append(_first(BUILT_IN[_name(source)].training_rows(), source))
            continue
        if source.hub == "object":
            tables.append(_named(_table_of(facts, source, live), source, config.task_column))
            continue
        try:
            loaded = load_source(
                source,
                use_hf=config.use_hf,
                seed=config.data_seed,
                shuffle=config.dataset_shuffle,
                offline=offline,
            )
        except DataError as error:
            if source.hub != "local":
                data = replace(facts.data, hub_problem=hub_problem(source.path, error))
                raise Unusable(replace(facts, data=data)) from error
            unreadable.append(unreadable_file(source.path, error))
            continue
        tables.append(_named(loaded.rows, source, config.task_column))
        notes += loaded.notes
    if unreadable:
        raise Unusable(replace(facts, data=replace(facts.data, unreadable=tuple(unreadable))))
    return replace(facts, data=replace(facts.data, notes=tuple(notes))), tables


def _table_of(facts: Facts, source: DataSource, live: Live) -> Rows:
    """The rows of an object, which has to hold them all; what is said of a stream is said of the objects."""
    rows = live[source.path].rows
    if rows is None:
        raise Unusable(facts)
    return rows


def _named(rows: Rows, source: DataSource, column: str | None) -> Rows:
    """The rows, with the name of the source as the task of those that have no such column."""
    if column is None or source.name is None:
        return rows
    named = {column: source.name}
    return Changed(rows, lambda row, _: row if column in row else {**row, **named}, ["named", named])


def one_table(facts: Facts, config: Config, tables: Sequence[Rows]) -> tuple[Facts, Rows, Rows]:
    """All sources as one table of rows, and the rows that are kept out of training."""
    try:
        rows = mix(tables, seed=config.data_seed, interleave_prob=config.interleave_prob or None)
        if config.columns:
            rows = rename_columns(rows, config.columns)
        train, held = split_rows(rows, config.split_dataset_ratio, seed=config.data_seed)
    except DataError as error:
        raise Unusable(with_data_problem(facts, data_problem(error))) from error
    return replace(facts, data=replace(facts.data, num_rows=len(rows))), train, held


def eval_rows(
    facts: Facts,
    config: Config,
    sources: Sequence[DataSource | str],
    kept_out: Rows,
    live: Live,
    *,
    offline: bool,
) -> tuple[Facts, list[tuple[str, Rows]]]:
    """The named sets to evaluate on: those of val_dataset, and what was split off."""
    sets: list[tuple[str, Rows]] = []
    if config.eval_strategy == "no":
        return facts, sets
    for source in sources:
        if not isinstance(source, DataSource):
            name = _name(source)
            sets.append((name, _first(BUILT_IN[name].held_out_rows(), source)))
            continue
        facts, (rows,) = load_tables(facts, config, [source], live, offline=offline)
        renamed: Rows = rows
        if config.columns:
            there = columns_of(rows)
            try:
                renamed = rename_columns(rows, {k: v for k, v in config.columns.items() if k in there})
            except DataError as error:
                error.columns = None  # what works for this set was not tried on the others
                raise
        sets.append((eval_name(source), renamed))
    if kept_out:
        sets.append(("split", kept_out))
    return facts, [(_unlike(name, [n for n, _ in sets[:i]]), rows) for i, (name, rows) in enumerate(sets)]


def _unlike(name: str, others: Sequence[str]) -> str:
    """The name, or with a number where a set before has it."""
    numbered = (name if n == 1 else f"{name}_{n}" for n in itertools.count(1))
    return next(n for n in numbered if n not in others)
