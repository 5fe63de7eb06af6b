"""Facts about gold answers: which can be read, how their lists are read, and which column has better ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from covey.checks.data.columns import open_lists_of, renamed_golds
from covey.checks.tasks.look import rows_of
from covey.data.prompts import chosen, fields_of
from covey.data.rows import PromptTable
from covey.options.schema import Config
from covey.plan.facts import Facts, GoldFacts, OpenLists
from covey.rewards.builtin import built_in_of
from covey.rewards.gold_lists import ColumnLists, names_alternatives
from covey.rewards.gold_texts import UnreadableGold, gold_texts, shown
from covey.rewards.golds import check_golds
from covey.texts import tr
from covey.types import GOLD_COLUMNS

_BUDGET_S = 1.0
_SHOWN = 3

Sets = Sequence[tuple[str, PromptTable]]


def gold_of(columns: Mapping[str, Any]) -> Any:
    """The gold answer of a row's columns, or None."""
    name = _gold_column(columns)
    return None if name is None else columns[name]


def gold_text(columns: Mapping[str, Any], config: Config) -> str:
    """The gold answer of a row as a completion would write it: the first alternative, or ""."""
    gold = gold_of(columns)
    if gold is None:
        return ""
    try:
        return gold_texts(gold, config.gold_lists)[0]
    except UnreadableGold:
        return shown(gold)


def with_golds(facts: Facts, config: Config, prompts: PromptTable | None, eval_sets: Sets) -> Facts:
    """The facts, and with them those of the golds, if a built-in reward reads golds as answers."""
    readers = [n for n in config.reward_funcs if (found := built_in_of(n)) is not None and found.parses_gold]
    if prompts is None or not readers:
        return facts
    tables = [
        ("", _asked(config, readers, prompts)),
        *((n, _asked(config, readers, t)) for n, t in eval_sets),
    ]
    lists: dict[tuple[str, str, str], ColumnLists] = {}
    golds = [_golds_of_a_set(name, table, config, lists) for name, table in tables]
    absent: list[tuple[int, str, str]] = []

    def of_training() -> Iterator[Any]:
        for number, gold in enumerate(golds[0]):
            if gold is None:
                absent.append((number, "", tr("no gold answer")))
            yield gold

    entries = tables[0][1].entries
    report = check_golds(of_training(), budget_s=_BUDGET_S, lists=config.gold_lists)
    for of_an_eval_set in golds[1:]:
        for _ in of_an_eval_set:
            pass
    bad = sorted([*report.bad, *absent])
    num_checked = report.num_checked + len(absent)
    rename = None
    if num_checked and len(bad) / num_checked > config.max_bad_gold:
        rename = renamed_golds(entries, config, facts.data.made_columns)
    of_golds = GoldFacts(
        num_checked=num_checked,
        num_bad=len(bad),
        examples=tuple((_row_number(tables[0][1], i), text, why) for i, text, why in bad[:_SHOWN]),
        rename=rename,
        num_lists=sum(of.num_lists for of in lists.values()),
        num_named=sum(of.num_named for of in lists.values()),
        open_lists=_open_lists(config, dict(tables), lists),
    )
    return replace(facts, rewards=replace(facts.rewards, golds=of_golds))


def _asked(config: Config, readers: Sequence[str], prompts: PromptTable) -> PromptTable:
    """The prompts whose golds are read. With rewards for each task, only those of tasks with such a
    reward."""
    if config.task_rewards is None:
        return prompts
    read = {i for name in readers for i in fields_of(rows_of(config, name, prompts).entries, "id")}
    numbers = [number for number, i in enumerate(fields_of(prompts.entries, "id")) if i in read]
    return replace(prompts, entries=chosen(prompts.entries, numbers))


def _golds_of_a_set(
    name: str, table: PromptTable, config: Config, lists: dict[tuple[str, str, str], ColumnLists]
) -> Iterator[Any]:
    """The golds of a set; their lists are counted on the way, by set, task and column."""
    tasks = fields_of(table.entries, "task")
    pairs = zip(tasks, fields_of(table.entries, "columns"), strict=True)
    for number, (task, columns) in enumerate(pairs):
        column = _gold_column(columns)
        gold = None if column is None else columns[column]
        if column is not None and isinstance(gold, list | dict):
            key = (
                name,
                task if config.task_column is not None else "",
                _name_in_data(config, columns, column),
            )
            lists.setdefault(key, ColumnLists()).add(number, gold)
        yield gold


def _gold_column(columns: Mapping[str, Any]) -> str | None:
    return next((name for name in GOLD_COLUMNS if columns.get(name) is not None), None)


def _name_in_data(config: Config, columns: Mapping[str, Any], column: str) -> str:
    """The name of a gold column in the data, before covey or `--columns` renamed it."""
    source = next((old for old, new in (config.columns or {}).items() if new == column), column)
    gold = columns[column]
    return next((n for n, value in columns.items() if names_alternatives(n) and value == gold), source)


def _open_lists(
    config: Config, tables: Mapping[str, PromptTable], lists: Mapping[tuple[str, str, str], ColumnLists]
) -> tuple[OpenLists, ...]:
    """The columns whose lists may be alternatives or the parts of one answer."""
    if config.gold_lists is not None:
        return ()
    found = (
        open_lists_of(of, column, partial(_row_number, tables[name]), name, task)
        for (name, task, column), of in lists.items()
    )
    return tuple(each for each in found if each is not None)


def _row_number(table: PromptTable, number: int) -> int:
    """The row of a prompt, counted from 1."""
    return table.entries[number].id + 1
