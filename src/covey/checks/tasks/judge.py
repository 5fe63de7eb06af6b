"""Finds faults in the tasks of the rows and with the rewards that are named for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.checks.check import Check
from covey.checks.tasks.codes import CODES
from covey.config.names import nearest
from covey.options.schema import Config
from covey.plan.facts import DataFacts, Facts, PromptFacts, RewardFacts, TaskFacts
from covey.plan.problem import problem, warning
from covey.plan.task_rewards import called
from covey.texts import counted, joined, tr
from covey.types import Fix, Problem

MOST_TASKS = 64
_EXAMPLE = tr('give each task its rewards: --task_rewards \'{"math": ["accuracy", "format"]}\'')
_NAMED = tr("for rows without the column, name the task of a source: --dataset math=FILE")


def task_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the tasks of the data say against task_column and task_rewards."""
    if config.task_column is None:
        return [] if config.task_rewards is None else [_without_column()]
    if config.streaming:
        return [_streamed(config)]
    return [
        *_rows(config, facts.data, facts.tasks),
        *_rewards(config, facts.tasks, facts.rewards),
        *_emptied(facts.prompts, facts.tasks),
    ]


def _without_column() -> Problem:
    return problem(
        "E347",
        "task_rewards",
        tr("task_rewards is set, but no column says which task a row belongs to."),
        "",
        Fix(text=tr("name the column with the task: --task_column NAME")),
        Fix(text=tr("leave out --task_rewards: every reward scores every row")),
    )


def _streamed(config: Config) -> Problem:
    return problem(
        "E346",
        "task_column",
        tr(
            "task_column is {task_column}, but streaming is on, so the tasks are not known before the run.",
            task_column=config.task_column,
        ),
        tr("The rewards of each task are checked against all rows, which a stream does not give in advance."),
        Fix(text=tr("read all rows before the run starts"), edits={"streaming": False}),
        Fix(
            text=tr(
                "leave out --task_column; a reward function of yours can return None for rows of other tasks"
            )
        ),
    )


def _rows(config: Config, data: DataFacts, tasks: TaskFacts) -> list[Problem]:
    """A column that is not there, rows without a task, and a column that is none of tasks."""
    column = str(config.task_column)
    columns = [c for c in data.columns or () if c != column]
    near = tasks.column_guess
    rename = (
        [Fix(text=tr("use the column with the nearest name"), edits={"task_column": near})] if near else []
    )
    if len(tasks.num_rows) > MOST_TASKS:
        shown = ", ".join(list(tasks.num_rows)[:3])
        seen = tr(
            "The column {column} names {num_tasks:,} tasks, more than {most_tasks}: {shown} ...",
            column=column,
            num_tasks=len(tasks.num_rows),
            most_tasks=MOST_TASKS,
            shown=shown,
        )
        cause = tr("The column may hold questions or numbers, not tasks.")
        return [
            problem(
                "E346", "task_column", seen, cause, Fix(text=tr("use another column: --task_column NAME"))
            )
        ]
    if not tasks.num_rows and tasks.without:
        seen = tr(
            "No row has a task in the column {column}. The columns are: {columns}.",
            column=column,
            columns=joined(", ", columns),
        )
        return [problem("E346", "task_column", seen, "", *rename, Fix(text=_NAMED))]
    shown = joined(
        "; ",
        [
            tr(
                "{rows}{source}: {numbers}{more}",
                rows=counted(rows.count, "row"),
                source=tr(" of {reason}", reason=rows.reason) if rows.reason else "",
                numbers=joined(", ", map(str, rows.rows)),
                more=" ..." if rows.count > len(rows.rows) else "",
            )
            for rows in tasks.without
        ],
    )
    if not shown:
        return []
    seen = tr("Rows without a task in the column {column}: {shown}.", column=column, shown=shown)
    cause = tr("The rows come from a source without that column, or the cell is empty.")
    return [
        problem("E346", "task_column", seen, cause, Fix(text=tr("give these rows a task")), Fix(text=_NAMED))
    ]


def _rewards(config: Config, tasks: TaskFacts, rewards: RewardFacts) -> list[Problem]:
    """Names in task_rewards that stand for nothing, and tasks and rewards that are not in it."""
    by_task = config.task_rewards
    if by_task is None:
        return []
    there = sorted({*tasks.num_rows, *tasks.evaluated})
    known = called(config.rewards, rewards.names)
    problems = [
        *(_unknown_reward(by_task, task, name, config) for task in by_task for name in by_task[task]
          if name not in known),
        *(_empty(task) for task, listed in by_task.items() if not listed),
    ]  # fmt: skip
    used = {known.get(name) for listed in by_task.values() for name in listed}
    idle = [entry for entry in dict.fromkeys(config.rewards) if entry not in used]
    unlisted = [task for task in there if task not in by_task]
    if there:
        absent = {task: nearest(task, unlisted) for task in by_task if task not in there}
        problems += [_unknown_task(by_task, task, there, near) for task, near in absent.items()]
        # What a misspelt name stands for is said there.
        unlisted = [task for task in unlisted if task not in absent.values()]
        problems += [_unlisted(by_task, task, idle or config.rewards) for task in unlisted]
    if idle and not unlisted and all(name in known for listed in by_task.values() for name in listed):
        problems.append(_idle(by_task, idle))
    return problems


def _entry(seen: str, cause: str, *fixes: Fix) -> Problem:
    return problem("E347", "task_rewards", seen, cause, *fixes)


def _with(
    by_task: Mapping[str, Sequence[str]], changes: Mapping[str, Sequence[str] | None]
) -> dict[str, Any]:
    """The edit that changes some entries; None takes one out."""
    changed = {**by_task, **changes}
    return {"task_rewards": {task: list(names) for task, names in changed.items() if names is not None}}


def _unknown_reward(by_task: Mapping[str, Sequence[str]], task: str, name: str, config: Config) -> Problem:
    near = nearest(name, config.rewards)
    fixes = [Fix(text=tr("the rewards are {rewards}", rewards=joined(", ", config.rewards)))]
    if near:
        names = [near if n == name else n for n in by_task[task]]
        fixes.insert(
            0, Fix(text=tr("use the reward with the nearest name"), edits=_with(by_task, {task: names}))
        )
    seen = tr("The task {task} names the reward {name}, which is not in reward_funcs.", task=task, name=name)
    return _entry(seen, tr("task_rewards can only name rewards of --reward_funcs."), *fixes)


def _empty(task: str) -> Problem:
    seen = tr("The task {task} has no reward.", task=task)
    return _entry(seen, tr("The list is empty, so nothing can be learned from its rows."), Fix(text=_EXAMPLE))


def _unknown_task(
    by_task: Mapping[str, Sequence[str]], task: str, there: Sequence[str], near: str | None
) -> Problem:
    less = _with(by_task, {task: None})
    fixes = [Fix(text=tr("leave out the task {task}", task=task), edits=less)] if less["task_rewards"] else []
    if near:
        renamed = {near if t == task else t: names for t, names in by_task.items()}
        fixes = [Fix(text=tr("use the task with the nearest name"), edits=_with(renamed, {}))]
    seen = tr("No row has task {task}; tasks found: {there}.", task=task, there=joined(", ", there))
    return _entry(seen, "", *fixes, Fix(text=_EXAMPLE))


def _unlisted(by_task: Mapping[str, Sequence[str]], task: str, rewards: Sequence[str]) -> Problem:
    near = nearest(task, list(by_task))
    names = by_task[near] if near else rewards
    words = tr("score it like {near}", near=near) if near else tr("score it with these rewards")
    seen = tr("task_rewards has no entry for the task {task}, so no reward would score its rows.", task=task)
    return _entry(seen, "", Fix(text=words, edits=_with(by_task, {task: names})))


def _idle(by_task: Mapping[str, Sequence[str]], idle: Sequence[str]) -> Problem:
    everywhere = {task: [*names, *idle] for task, names in by_task.items()}
    return _entry(
        tr("{idle} scores no task.", idle=joined(", ", idle)),
        tr("The reward is missing from task_rewards, or is not needed."),
        Fix(text=tr("score every task with it too"), edits=_with(everywhere, {})),
        Fix(text=tr("leave it out of --reward_funcs and --reward_weights")),
    )


def _emptied(prompts: PromptFacts, tasks: TaskFacts) -> list[Problem]:
    """Tasks that no row is left of once pass rates are applied."""
    gone = [task for task, count in tasks.num_rows.items() if not count]
    if not gone or not prompts.num_used:
        return []
    return [
        warning(
            "W128",
            "task_column",
            tr(
                "No rows are left of these tasks: {gone}. All their pass rates are outside "
                "min_pass_rate and max_pass_rate.",
                gone=joined(", ", gone),
            ),
            tr("The model always solves these tasks, or never."),
            Fix(text=tr("use other bounds: --min_pass_rate X, --max_pass_rate X")),
            Fix(text=tr("leave its rows out of the data")),
        )
    ]


CHECK = Check(place=160, judge=lambda config, facts, _: task_problems(config, facts), codes=CODES)
