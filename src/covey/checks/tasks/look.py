"""Facts about the tasks of the rows, and which rows a reward is asked about."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from covey.checks.tasks.judge import MOST_TASKS
from covey.data.prompts import chosen, fields_of
from covey.data.rows import PromptTable, task_of
from covey.options.schema import Config
from covey.plan.facts import Facts, LeftOut
from covey.plan.task_rewards import called
from covey.types import Prompt

_NAMED_ROWS = 5


def with_tasks(
    facts: Facts,
    config: Config,
    whole: PromptTable,
    used: PromptTable,
    sets: Sequence[tuple[str, PromptTable]],
) -> Facts:
    """The facts with the tasks of the data, `whole` and what is `used` of it, and of the sets to evaluate
    on."""
    if config.task_column is None or config.streaming:
        return facts
    counts = Counter(fields_of(used.entries, "task"))
    without = []
    for name, table in (("", whole), *sets):
        lacking = [number for number, task in enumerate(fields_of(table.entries, "task")) if not task]
        if lacking:
            rows = tuple(table.entries[number].id + 1 for number in lacking[:_NAMED_ROWS])
            without.append(LeftOut(reason=name, count=len(lacking), rows=rows))
    names = set(fields_of(whole.entries, "task"))
    return replace(
        facts,
        tasks=replace(
            facts.tasks,
            column_guess=None if names - {""} else _guess(config.task_column, whole),
            num_rows={task: counts[task] for task in sorted(names - {""})},
            evaluated=tuple(
                sorted({t for _, table in sets for t in fields_of(table.entries, "task")} - {""})
            ),
            without=tuple(without),
        ),
    )


def _guess(column: str, table: PromptTable) -> str | None:
    """The column of a near name that names a task in every row, or None."""
    for near in difflib.get_close_matches(column, [c for c in table.columns if c != column]):
        tasks = {task_of(columns, near) for columns in fields_of(table.entries, "columns")}
        if "" not in tasks and len(tasks) <= MOST_TASKS:
            return near
    return None


def rows_of(config: Config, entry: str, prompts: PromptTable) -> PromptTable:
    """The prompts that an entry of reward_funcs scores."""
    if config.task_rewards is None:
        return prompts
    known = called(config.rewards, ())
    tasks = {t for t, listed in config.task_rewards.items() if entry in {known.get(n) for n in listed}}
    asked = [number for number, task in enumerate(fields_of(prompts.entries, "task")) if task in tasks]
    return replace(prompts, entries=chosen(prompts.entries, asked))


def firsts(config: Config, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts to try rewards on: the first, or the first of each task where tasks have rewards of their
    own."""
    if config.task_rewards is None:
        return list(prompts[:1])
    by_task: dict[str, int] = {}
    for number, task in enumerate(fields_of(prompts, "task")):
        by_task.setdefault(task, number)
    return [prompts[number] for number in by_task.values()]
