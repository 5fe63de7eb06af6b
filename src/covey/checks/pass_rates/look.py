"""Facts about measured pass rates, and the rows that are left once they are applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os.path import exists, expanduser, isfile
from pathlib import Path

from covey.data.errors import DataError, nearest
from covey.data.jsonl import iter_jsonl
from covey.data.pass_rates import FILE, NUM_BINS, Tally, bin_of, checksum, digest, rate_of, tallies_of, tally
from covey.data.prompts import chosen, fields_of, rated
from covey.data.rows import PromptTable
from covey.errors import CoveyError
from covey.options.schema import Config
from covey.plan.facts import PassRateFacts
from covey.rollout.records import score_of
from covey.telemetry.rollouts import list_rollouts, read_rollouts
from covey.texts import counted, joined, tr
from covey.types import Prompt, ScorePart

_NAMED_ROWS = 5


def with_pass_rates(config: Config, table: PromptTable) -> tuple[PromptTable, PassRateFacts | None]:
    """The rows within min_pass_rate and max_pass_rate, each with its rate; and what was found."""
    if config.streaming or (config.pass_rates is None) == (config.pass_rate_column is None):
        return table, None
    where = config.pass_rates or tr("the column {pass_rate_column}", pass_rate_column=config.pass_rate_column)
    try:
        if config.pass_rates is not None:
            found = _measured(Path(expanduser(config.pass_rates)))
            rates, sign = _matched(table.entries, found), digest(found)
        else:
            assert config.pass_rate_column is not None
            rates, sign = _of_column(table, config.pass_rate_column), ""
    except (CoveyError, OSError) as error:
        return table, PassRateFacts(where=where, problem=str(error))
    low, high = config.min_pass_rate, config.max_pass_rate
    kept = [number for number, rate in enumerate(rates) if rate is None or low <= rate <= high]
    measured = [rate for rate in rates if rate is not None]
    bins = Counter(bin_of(rate) for rate in measured)
    facts = PassRateFacts(
        where=where,
        digest=sign,
        num_rows=len(rates),
        num_measured=len(measured),
        num_kept=len(kept),
        histogram=tuple(bins[i] for i in range(NUM_BINS)),
    )
    return replace(table, entries=chosen(rated(table.entries, rates), kept)), facts


def _matched(prompts: Sequence[Prompt], found: dict[str, Tally]) -> list[float | None]:
    tallies = (found.get(checksum(p)) for p in prompts)
    return [None if t is None else t.rate for t in tallies]


def _of_column(table: PromptTable, column: str) -> list[float | None]:
    if column not in table.columns:
        raise DataError(
            tr(
                "no row has this column{nearest}; the columns are {columns}",
                nearest=nearest(column, table.columns),
                columns=joined(", ", table.columns),
            )
        )
    rates, wrong = [], []
    for number, columns in enumerate(fields_of(table.entries, "columns")):
        rates.append(_number(columns.get(column)))
        if rates[-1] is None and columns.get(column) not in (None, ""):
            wrong.append(number)
    if wrong:
        rows = ", ".join(str(table.entries[number].id + 1) for number in wrong[:_NAMED_ROWS])
        rows += " ..." if len(wrong) > _NAMED_ROWS else ""
        raise DataError(
            tr(
                "in {in_rows} ({rows}) its value is not a number from 0 to 1",
                in_rows=counted(len(wrong), "row"),
                rows=rows,
            )
        )
    if rates and all(rate is None for rate in rates):
        raise DataError(tr("no row has a number in this column"))
    return rates


def _number(value: object) -> float | None:
    """The pass rate that a cell holds; a table of text holds numbers as words."""
    try:
        return rate_of(float(value) if isinstance(value, str) else value)
    except ValueError:
        return None


def _measured(path: Path) -> dict[str, Tally]:
    """Read pass rates from their file, or compute them from the rollouts of a run."""
    if not exists(path):
        raise DataError(tr("it does not exist"))
    if isfile(path):
        return tallies_of(iter_jsonl(path))
    if isfile(path / FILE):
        return tallies_of(iter_jsonl(path / FILE))
    directory = path / "rollouts"
    if not list_rollouts(directory):
        raise DataError(tr("it contains neither {file} nor rollouts/", file=FILE))
    found = tally(_samples(directory))
    if not found:
        raise DataError(tr("its rollouts contain no checksums of prompts, or no rewards"))
    return found


def _samples(directory: Path) -> Iterator[tuple[str, Sequence[ScorePart]]]:
    for _, records in read_rollouts(directory, may_be_unfinished=True):
        for record in records:
            if "checksum" in record:
                yield record["checksum"], score_of(record).parts
