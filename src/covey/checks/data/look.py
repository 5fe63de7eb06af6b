"""Facts about the data: its sources, rows and prompts, and the sets to evaluate on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.checks.data.columns import with_columns
from covey.checks.data.faults import data_problem
from covey.checks.data.rows import left_words
from covey.checks.data.sources import (
    Live,
    Rows,
    Unusable,
    eval_rows,
    load_tables,
    one_table,
    sources_of,
    with_data_problem,
)
from covey.checks.model.look import details_of
from covey.checks.pass_rates.look import with_pass_rates
from covey.checks.tasks.look import with_tasks
from covey.data.errors import DataError, TemplateError
from covey.data.image_records import NO_ROWS, ImageRows
from covey.data.prompt import system_text
from covey.data.rows import PromptOptions, PromptTable, prompt_table
from covey.data.sources import DataSource, stream_rows
from covey.data.stream import PromptStream, StreamRows
from covey.data.text import TextCodec
from covey.media.families import FAMILIES
from covey.options.schema import Config
from covey.plan.facts import DataProblem, EvalSet, Facts, LeftOut, ModelFacts
from covey.plan.reasons import REFUSED
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.types import Prompt

_PATIENCE_S = 1.0

Tools = Sequence[Mapping[str, Any]]
_SAMPLED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Holds the prompts to train on, as a table or a stream, and the named tables to evaluate on.

    `sample` is the table, or the first rows of the stream. `images` are the rows of both.
    """

    prompts: PromptTable | None = None
    stream: PromptStream | None = None
    sample: PromptTable | None = None
    eval_sets: tuple[tuple[str, PromptTable], ...] = ()
    images: ImageRows = NO_ROWS


def with_data(
    facts: Facts,
    config: Config,
    codec: TextCodec | None,
    *,
    offline: bool,
    live: Live | None = None,
    tools: Tools = (),
) -> tuple[Facts, Data]:
    """The facts with those of the data, and what was read; `live` are rows that the program holds, by name,
    and `tools` those that prompts tell the model of."""
    try:
        sources = sources_of(facts, config.dataset, live or {})
        held = sources_of(facts, config.val_dataset, live or {})
        if config.streaming:
            return _streamed(facts, config, codec, sources, held, live or {}, tools, offline=offline)
        facts, tables = load_tables(facts, config, sources, live or {}, offline=offline)
        facts, rows, kept_out = one_table(facts, config, tables)
        facts, sets = eval_rows(facts, config, held, kept_out, live or {}, offline=offline)
        facts = with_columns(facts, config, rows, sets)
        if codec is None or facts.data.missing_columns:
            return facts, Data()
        return _rendered(facts, config, codec, rows, sets, tools)
    except Unusable as unusable:
        return unusable.facts, Data()
    except DataError as error:
        # A file that has changed since it was opened.
        return with_data_problem(facts, data_problem(error)), Data()


def image_rows(
    facts: Facts, config: Config, *, offline: bool, live: Live | None = None
) -> tuple[Facts, ImageRows]:
    """The rows in which images of a run on these data lie, of which no prompts are made; the facts say why
    there are none."""
    folders = prompt_options(config).image_folders
    try:
        sources = sources_of(facts, config.dataset, live or {})
        if config.streaming:
            real = [s for s in sources if isinstance(s, DataSource)]
            rows = stream_rows(real, use_hf=config.use_hf, offline=offline, live=live or {})
            return facts, ImageRows(StreamRows(rows, config.columns), folders)
        facts, tables = load_tables(facts, config, sources, live or {}, offline=offline)
        facts, table, _ = one_table(facts, config, tables)
    except Unusable as unusable:
        return unusable.facts, NO_ROWS
    except DataError as error:
        return with_data_problem(facts, data_problem(error)), NO_ROWS
    return facts, ImageRows(table, folders)


def _rendered(
    facts: Facts,
    config: Config,
    codec: TextCodec,
    rows: Rows,
    sets: Sequence[tuple[str, Rows]],
    tools: Tools,
) -> tuple[Facts, Data]:
    limit = longest_allowed(facts.model, config)
    sees_images = codec.vision is not None or facts.model.type in FAMILIES
    facts = replace(facts, data=replace(facts.data, sees_images=sees_images))
    try:
        options = prompt_options(config, tools)
        table = prompt_table(rows, codec, max_length=limit, options=options, progress=_progress())
        tables = tuple(
            (name, prompt_table(found, codec, max_length=limit, options=options)) for name, found in sets
        )
    except TemplateError as error:
        template = replace(facts.template, problem=str(error), details=details_of(error))
        return replace(facts, template=template), Data()
    except DataError as error:
        return with_data_problem(facts, data_problem(error)), Data()
    empty = [name for name, found in tables if not found.entries]
    if empty:
        facts = _of_sets(facts, tables)
        if any(found.reason in REFUSED for found in facts.data.left_out):
            return facts, Data()
        left = left_words(facts.data, empty[0])
        words = tr(
            "the set to evaluate on, {empty}, has no usable prompt{words}",
            empty=empty[0],
            words=tr(": {left}", left=left) if left else "",
        )
        return with_data_problem(facts, DataProblem(words=words, option="val_dataset")), Data()
    used, measured = with_pass_rates(config, table)
    facts = _of_sets(_of_table(facts, used, table), tables)
    facts = with_tasks(facts, config, table, used, tables)
    sizes = tuple(EvalSet(name=name, num_prompts=len(found.entries)) for name, found in tables)
    facts = replace(facts, data=replace(facts.data, pass_rates=measured, eval_sets=sizes))
    images = NO_ROWS if codec.vision is None else ImageRows(rows, options.image_folders)
    return facts, Data(prompts=used, sample=used, eval_sets=tables, images=images)


def _of_table(facts: Facts, used: PromptTable, table: PromptTable) -> Facts:
    """The facts with those of the whole table, and of what is used of it."""
    reasons = _left_out(table, "")
    if table.num_cut:
        reasons.append(LeftOut(reason="cut", count=table.num_cut))
    num_rows = len(table.entries) + sum(table.left_out.values())
    first = used.entries[0] if used.entries else None
    return replace(
        facts,
        prompts=replace(
            facts.prompts,
            num_used=len(used.entries),
            **(_image_facts(used.entries) if facts.data.sees_images else {"has_images": False}),
            num_too_long=table.left_out.get("too_long", 0),
            longest=used.longest,
            longest_in_data=table.longest_in_data,
            first=None if first is None else first.text,
            are_text=table.num_raw > 0,
            mention_format=any("<think>" in p.text or "<answer>" in p.text for p in used.entries[:_SAMPLED])
            if first is not None
            else None,
        ),
        data=replace(
            facts.data,
            left_out=tuple(reasons),
            media_columns=table.media_columns,
            unread_columns=table.unread_columns,
            unused_columns=table.unused_columns,
            notes=(*facts.data.notes, *_read_as(table, num_rows), *_unread_limits(used.entries)),
        ),
    )


def _unread_limits(prompts: Sequence[Prompt]) -> list[str]:
    """Return a sentence where the environment sets the smallest size of images, as ms-swift reads it."""
    names = [name for name in ("MIN_PIXELS", "IMAGE_MIN_TOKEN_NUM") if os.environ.get(name)]
    if not names or not any(prompt.media for prompt in prompts):
        return []
    return [
        tr(
            "{names} is set and not read: the model's files give the smallest size of images",
            names=joined(", ", names),
        )
    ]


def _image_facts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The facts of the images of prompts."""
    media = [medium for prompt in prompts for medium in prompt.media]
    if not prompts:
        return {}
    if not media:
        return {"has_images": False}
    tokens = [medium.num_tokens for medium in media]
    patches = [sum(m.source.limits.num_patches(m.grid) for m in prompt.media) for prompt in prompts]
    return {
        "has_images": True,
        "num_images": len(media),
        "most_patches": max(patches),
        "image_tokens": (min(tokens), max(tokens)),
    }


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
    return replace(
        facts,
        data=replace(facts.data, left_out=(*facts.data.left_out, *left), notes=(*facts.data.notes, *notes)),
    )


def _read_as(table: PromptTable, num_rows: int) -> list[str]:
    """Return sentences that name the columns in which values were found under other names than covey's, and
    in how many rows, if not in all."""
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
    tools: Tools,
    *,
    offline: bool,
) -> tuple[Facts, Data]:
    """The facts of the first rows; the others are read as they are needed."""
    real = [s for s in sources if isinstance(s, DataSource)]
    if len(real) < len(sources):
        words = tr("the built-in task cannot be streamed: leave out --streaming")
        raise Unusable(with_data_problem(facts, DataProblem(words=words, option="streaming")))
    facts, sets = eval_rows(facts, config, held, (), live, offline=offline)
    if codec is None:
        return facts, Data()
    limit = longest_allowed(facts.model, config)
    try:
        stream = PromptStream(
            stream_rows(real, use_hf=config.use_hf, offline=offline, live=live),
            codec,
            max_length=limit,
            options=prompt_options(config, tools),
            seed=config.data_seed,
            shuffle=config.dataset_shuffle,
            columns=config.columns,
        )
        block = stream.first_block()
        first = stream.first_rows()
    except (DataError, TemplateError) as error:
        raise Unusable(with_data_problem(facts, data_problem(error))) from error
    facts = with_columns(facts, config, first, sets)
    if facts.data.missing_columns:
        return facts, Data()
    facts, data = _rendered(facts, config, codec, (), sets, tools)
    longest = limit if limit is not None else block.longest
    of_sets = tuple(found for found in facts.data.left_out if found.where)
    facts = _of_table(facts, block, block)
    # How many there are is not known, but for a beginning without any.
    num_used, num_rows = (None, facts.data.num_rows) if block.entries else (0, len(first))
    facts = replace(
        facts,
        prompts=replace(
            facts.prompts, num_used=num_used, longest=longest, has_images=facts.prompts.has_images or None
        ),
        data=replace(facts.data, num_rows=num_rows, left_out=(*facts.data.left_out, *of_sets)),
    )
    images = replace(data.images, table=stream.rows())
    return facts, replace(data, prompts=None, stream=stream, sample=block, images=images)


def prompt_options(config: Config, tools: Tools = ()) -> PromptOptions:
    """Return the options that make prompts of rows; the prompts describe `tools`."""
    return PromptOptions(
        system=None if config.system is None else system_text(config.system),
        apply_chat_template=config.apply_chat_template,
        truncation_strategy=config.truncation_strategy,
        task_column=config.task_column,
        tools=tuple(tools),
        has_environment=config.environment_factory is not None or config.multi_turn_scheduler is not None,
        image_folders=_image_folders(config),
    )


def _image_folders(config: Config) -> tuple[str, ...]:
    """Return where relative paths of images start from: here, as in ms-swift, or a folder of the data."""
    names = [name.partition("=")[2] or name for name in (*config.dataset, *config.val_dataset)]
    there = [os.path.expanduser(name.rpartition("#")[0] or name) for name in names]
    folders = [name if os.path.isdir(name) else os.path.dirname(name) for name in there]
    root = [own] if (own := os.environ.get("ROOT_IMAGE_DIR")) else []
    return tuple(dict.fromkeys([*root, "", *(f for f in folders if os.path.isdir(f))]))


def longest_allowed(model: ModelFacts, config: Config) -> int | None:
    """Tokens that a prompt may have: as typed, else what the model's context leaves for it."""
    if config.max_length is not None or model.context is None:
        return config.max_length
    return max(1, model.context - config.max_completion_length)


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
