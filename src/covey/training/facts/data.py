"""Facts about the data: its sources, rows and prompts, and the sets to evaluate on."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import exists
from pathlib import Path
from typing import Any

from covey.data.errors import DataError, TemplateError
from covey.data.lazy_rows import Changed, columns_of
from covey.data.live import LiveRows
from covey.data.mix import mix, rename_columns, split_rows
from covey.data.prompt import system_text
from covey.data.rows import PromptOptions, PromptTable, prompt_table
from covey.data.sources import DataSource, eval_name, load_source, parse_source, stream_rows
from covey.data.stream import PromptStream
from covey.data.text import TextCodec
from covey.options.schema import Config
from covey.plan.check_rows import left_words
from covey.plan.facts import DataProblem, EvalSet, Facts, LeftOut, UnreadableFile
from covey.plan.reasons import REFUSED
from covey.quickstart import task
from covey.texts import tr
from covey.texts.language import spoken
from covey.training.facts.columns import with_columns
from covey.training.facts.data_faults import data_problem, hub_problem, unreadable_file
from covey.training.facts.model import QUICKSTART, details_of
from covey.training.facts.pass_rates import with_pass_rates
from covey.training.facts.tasks import with_tasks

_PATIENCE_S = 1.0
_SAMPLED = 1000

Rows = Sequence[Mapping[str, Any]]
Live = Mapping[str, LiveRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What was read: the prompts to train on as a table or a stream, and the named tables to evaluate on.

    `sample` is the table, or the first rows of the stream.
    """

    prompts: PromptTable | None = None
    stream: PromptStream | None = None
    sample: PromptTable | None = None
    eval_sets: tuple[tuple[str, PromptTable], ...] = ()


class _Unusable(Exception):
    """What was learnt before it turned out that the data cannot be used."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts


def with_data(
    facts: Facts, config: Config, codec: TextCodec | None, *, offline: bool, live: Live | None = None
) -> tuple[Facts, Data]:
    """The facts with those of the data, and what was read; `live` are rows that the program holds, by
    name."""
    try:
        sources = _sources(facts, config.dataset, live or {})
        held = _sources(facts, config.val_dataset, live or {})
        if config.streaming:
            return _streamed(facts, config, codec, sources, held, live or {}, offline=offline)
        facts, tables = _load(facts, config, sources, live or {}, offline=offline)
        facts, rows, kept_out = _one_table(facts, config, tables)
        facts, sets = _eval_rows(facts, config, held, kept_out, live or {}, offline=offline)
        facts = with_columns(facts, config, rows, sets)
        if codec is None or facts.missing_columns:
            return facts, Data()
        return _rendered(facts, config, codec, rows, sets)
    except _Unusable as unusable:
        return unusable.facts, Data()
    except DataError as error:
        # A file that has changed since it was opened.
        return replace(facts, data_problem=data_problem(error)), Data()


def _sources(facts: Facts, texts: Sequence[str], live: Live) -> list[DataSource | str]:
    """Each argument taken apart; the built-in task stays the word that it is."""
    parsed: list[DataSource | str] = []
    for text in texts:
        try:
            source = parse_source(text)  # also of the built-in task, for what stands after its #
            parsed.append(text if text.partition("#")[0] == QUICKSTART else source)
        except DataError as error:
            raise _Unusable(replace(facts, data_problem=data_problem(error))) from error
    missing = tuple(
        s.path for s in parsed if isinstance(s, DataSource) and s.hub == "local" and not exists(Path(s.path))
    )
    if missing:
        raise _Unusable(replace(facts, dataset_missing=missing))
    if any(isinstance(s, DataSource) and s.hub == "object" and s.path not in live for s in parsed):
        raise _Unusable(facts)  # which is said of the objects themselves
    return parsed


def _first(rows: Rows, text: str) -> Rows:
    """The rows of the built-in task that `quickstart#N` means; they lie in a random order already."""
    _, mark, number = text.partition("#")
    return rows[: int(number)] if mark else rows


def _load(
    facts: Facts, config: Config, sources: Sequence[DataSource | str], live: Live, *, offline: bool
) -> tuple[Facts, list[Rows]]:
    tables: list[Rows] = []
    unreadable: list[UnreadableFile] = []
    notes = list(facts.data_notes)
    for source in sources:
        if not isinstance(source, DataSource):
            tables.append(_first(task.training_rows(), source))
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
                raise _Unusable(replace(facts, hub_problem=hub_problem(source.path, error))) from error
            unreadable.append(unreadable_file(source.path, error))
            continue
        tables.append(_named(loaded.rows, source, config.task_column))
        notes += loaded.notes
    if unreadable:
        raise _Unusable(replace(facts, dataset_unreadable=tuple(unreadable)))
    return replace(facts, data_notes=tuple(notes)), tables


def _table_of(facts: Facts, source: DataSource, live: Live) -> Rows:
    """The rows of an object, which has to hold them all; what is said of a stream is said of the objects."""
    rows = live[source.path].rows
    if rows is None:
        raise _Unusable(facts)
    return rows


def _named(rows: Rows, source: DataSource, column: str | None) -> Rows:
    """The rows, with the name of the source as the task of those that have no such column."""
    if column is None or source.name is None:
        return rows
    named = {column: source.name}
    return Changed(rows, lambda row, _: row if column in row else {**row, **named}, ["named", named])


def _one_table(facts: Facts, config: Config, tables: Sequence[Rows]) -> tuple[Facts, Rows, Rows]:
    """All sources as one table of rows, and the rows that are kept out of training."""
    try:
        rows = mix(tables, seed=config.data_seed, interleave_prob=config.interleave_prob or None)
        if config.columns:
            rows = rename_columns(rows, config.columns)
        train, held = split_rows(rows, config.split_dataset_ratio, seed=config.data_seed)
    except DataError as error:
        raise _Unusable(replace(facts, data_problem=data_problem(error))) from error
    return replace(facts, num_rows=len(rows)), train, held


def _eval_rows(
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
            sets.append((QUICKSTART, _first(task.held_out_rows(), source)))
            continue
        facts, (rows,) = _load(facts, config, [source], live, offline=offline)
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


def _rendered(
    facts: Facts, config: Config, codec: TextCodec, rows: Rows, sets: Sequence[tuple[str, Rows]]
) -> tuple[Facts, Data]:
    limit = longest_allowed(facts, config)
    try:
        options = prompt_options(config)
        table = prompt_table(rows, codec, max_length=limit, options=options, progress=_progress())
        tables = tuple(
            (name, prompt_table(found, codec, max_length=limit, options=options)) for name, found in sets
        )
    except TemplateError as error:
        return replace(facts, template_problem=str(error), template_details=details_of(error)), Data()
    except DataError as error:
        return replace(facts, data_problem=data_problem(error)), Data()
    empty = [name for name, found in tables if not found.entries]
    if empty:
        facts = _of_sets(facts, tables)
        if any(found.reason in REFUSED for found in facts.left_out):
            return facts, Data()
        left = left_words(facts, empty[0])
        words = tr(
            "the set to evaluate on, {empty}, has no usable prompt{words}",
            empty=empty[0],
            words=tr(": {left}", left=left) if left else "",
        )
        return replace(facts, data_problem=DataProblem(words=words, option="val_dataset")), Data()
    used, measured = with_pass_rates(config, table)
    facts = replace(_of_table(facts, used, table), pass_rates=measured)
    facts = _of_sets(facts, tables)
    facts = with_tasks(facts, config, table, used, tables)
    sizes = tuple(EvalSet(name=name, num_prompts=len(found.entries)) for name, found in tables)
    return replace(facts, eval_sets=sizes), Data(prompts=used, sample=used, eval_sets=tables)


def _of_table(facts: Facts, used: PromptTable, table: PromptTable) -> Facts:
    """The facts with those of the whole table, and of what is used of it."""
    reasons = _left_out(table, "")
    if table.num_cut:
        reasons.append(LeftOut(reason="cut", count=table.num_cut))
    num_rows = len(table.entries) + sum(table.left_out.values())
    first = used.entries[0] if used.entries else None
    return replace(
        facts,
        num_prompts=len(used.entries),
        num_prompts_too_long=table.left_out.get("too_long", 0),
        longest_prompt=used.longest,
        longest_prompt_in_data=table.longest_in_data,
        left_out=tuple(reasons),
        media_columns=table.media_columns,
        unread_columns=table.unread_columns,
        unused_columns=table.unused_columns,
        data_notes=(*facts.data_notes, *_read_as(table, num_rows)),
        first_prompt=None if first is None else first.text,
        prompts_are_text=table.num_raw > 0,
        mentions_format=any("<think>" in p.text or "<answer>" in p.text for p in used.entries[:_SAMPLED])
        if first is not None
        else None,
    )


def _left_out(table: PromptTable, where: str) -> list[LeftOut]:
    return [
        LeftOut(
            reason=reason,
            count=count,
            rows=tuple(n + 1 for n in table.left_out_rows.get(reason, ())),
            detail=table.details.get(reason, ""),
            role=table.roles.get(reason, ""),
            where=where,
        )
        for reason, count in table.left_out.items()
    ]


def _of_sets(facts: Facts, sets: Sequence[tuple[str, PromptTable]]) -> Facts:
    """The facts with what is left out of the sets to evaluate on."""
    left = [found for name, table in sets for found in _left_out(table, name)]
    notes = [
        tr("{name}, {words}", name=name, words=words)
        for name, table in sets
        for words in _read_as(table, len(table.entries) + sum(table.left_out.values()))
    ]
    return replace(facts, left_out=(*facts.left_out, *left), data_notes=(*facts.data_notes, *notes))


def _read_as(table: PromptTable, num_rows: int) -> list[str]:
    """What was read from elsewhere than where covey's own form has it, and in how many rows if not in all."""
    return [
        words
        if count >= num_rows
        else tr("{words} ({count:,} of {num_rows:,} rows)", words=words, count=count, num_rows=num_rows)
        for words, count in table.read_as.items()
    ]


def _streamed(
    facts: Facts,
    config: Config,
    codec: TextCodec | None,
    sources: Sequence[DataSource | str],
    held: Sequence[DataSource | str],
    live: Live,
    *,
    offline: bool,
) -> tuple[Facts, Data]:
    """The facts of the first rows; the others are read as they are needed."""
    real = [s for s in sources if isinstance(s, DataSource)]
    if len(real) < len(sources):
        words = tr("the built-in task cannot be streamed: leave out --streaming")
        raise _Unusable(replace(facts, data_problem=DataProblem(words=words, option="streaming")))
    facts, sets = _eval_rows(facts, config, held, (), live, offline=offline)
    if codec is None:
        return facts, Data()
    limit = longest_allowed(facts, config)
    try:
        stream = PromptStream(
            stream_rows(real, use_hf=config.use_hf, offline=offline, live=live),
            codec,
            max_length=limit,
            options=prompt_options(config),
            seed=config.data_seed,
            shuffle=config.dataset_shuffle,
            columns=config.columns,
        )
        block = stream.first_block()
        first = stream.first_rows()
    except (DataError, TemplateError) as error:
        raise _Unusable(replace(facts, data_problem=data_problem(error))) from error
    facts = with_columns(facts, config, first, sets)
    if facts.missing_columns:
        return facts, Data()
    facts, data = _rendered(facts, config, codec, (), sets)
    longest = limit if limit is not None else block.longest
    of_sets = tuple(found for found in facts.left_out if found.where)
    facts = replace(_of_table(facts, block, block), longest_prompt=longest)
    facts = replace(facts, left_out=(*facts.left_out, *of_sets))
    # How many there are is not known, but for a beginning without any.
    facts = replace(facts, num_prompts=None) if block.entries else replace(facts, num_rows=len(first))
    return facts, replace(data, prompts=None, stream=stream, sample=block)


def prompt_options(config: Config) -> PromptOptions:
    """How rows become prompts."""
    return PromptOptions(
        system=None if config.system is None else system_text(config.system),
        apply_chat_template=config.apply_chat_template,
        truncation_strategy=config.truncation_strategy,
        task_column=config.task_column,
    )


def longest_allowed(facts: Facts, config: Config) -> int | None:
    """Tokens that a prompt may have: as typed, else what the model's context leaves for it."""
    if config.max_length is not None or facts.model_context is None:
        return config.max_length
    return max(1, facts.model_context - config.max_completion_length)


def _progress() -> Callable[[int, int], None]:
    """Says how many rows are read, once that takes longer than a second."""
    started = last = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        is_last_word = done == total and last > started
        if now - last >= _PATIENCE_S or is_last_word:
            last = now
            end = "\n" if done == total or not sys.stderr.isatty() else "\r"
            sys.stderr.write(
                spoken(
                    tr("reading the data: {done:,} of {total:,} rows{end}", done=done, total=total, end=end)
                )
            )
            sys.stderr.flush()

    return say
