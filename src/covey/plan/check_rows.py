"""What is wrong with the rows of the data and their columns."""

from __future__ import annotations

from typing import Any

from covey.options.schema import Config
from covey.plan.facts import Facts, LeftOut, MissingColumn
from covey.plan.problem import problem, warning
from covey.plan.reasons import REASONS, REFUSED
from covey.plan.shape import counted
from covey.plan.words import flags
from covey.types import Fix, Problem

_COUNTED_ELSEWHERE = ("too_long", "cut", "media", *REFUSED)
_ROLES = "system, user (human), assistant (gpt, bot), tool (observation), function_call, developer"


def row_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about rows and columns say against the configuration."""
    return [
        *_columns(config, facts),
        *_media(facts),
        *(_refused(config, left_out) for left_out in facts.left_out if left_out.reason in REFUSED),
        *_left_out(facts),
        *_unread(facts),
        *_unused(facts),
    ]


def left_words(facts: Facts, where: str = "") -> str:
    """Return how many rows are left out for which reason, and the numbers of the first ones."""
    return "; ".join(
        f"{counted(rows.count, 'row')} {REASONS.get(rows.reason, rows.reason)}: {numbers(rows)}"
        for rows in facts.left_out
        if rows.where == where and rows.reason not in _COUNTED_ELSEWHERE
    )


def numbers(left_out: LeftOut) -> str:
    """Return the numbers of the first rows: `4, 9, 11, 12, 20 ...`."""
    return f"{', '.join(map(str, left_out.rows))}{' ...' if left_out.count > len(left_out.rows) else ''}"


def _media(facts: Facts) -> list[Problem]:
    if not facts.media_columns:
        return []
    return [
        problem(
            "E312",
            "dataset",
            f"The data holds images, audio or video: {', '.join(facts.media_columns)}.",
            "A data set for vision models.",
            Fix(text="use a data set without media, or remove these rows and columns"),
        )
    ]


def _refused(config: Config, left_out: LeftOut) -> Problem:
    """A kind of row that is refused: training without what stands there would be another task."""
    option = "val_dataset" if left_out.where else "dataset"
    whose = f" of the set {left_out.where}" if left_out.where else ""
    rows = f"{counted(left_out.count, 'row')}{whose} ({numbers(left_out)})"
    first, code = f"row {left_out.rows[0]}", REFUSED[left_out.reason]
    if left_out.reason == "lost":
        seen = f"The chat template leaves out a message of {rows}. In {first}: the {left_out.detail}."
        fixes = [Fix(text="a chat template that writes every message: --chat_template FILE")]
        if left_out.detail.startswith("system ") and config.system is not None:
            fixes.append(Fix(text="leave out --system, or put its words into the user's messages"))
        elif left_out.detail.startswith("developer "):
            fixes.append(Fix(text="give this message the role system"))
        elif left_out.detail.startswith("system "):
            fixes.append(Fix(text="put the words of this message into the user's message"))
        return problem(code, option, seen, "", *fixes)
    if left_out.reason == "tools_lost":
        seen = (
            f"The chat template does not write the tools of {rows}. In {first}: the tool {left_out.detail!r}."
        )
        renamed = {**(config.columns or {}), _source(config, "tools"): "unused_tools"}
        return problem(
            code,
            option,
            seen,
            "",
            Fix(text="a chat template that writes tools: --chat_template FILE"),
            Fix(text="train on these prompts without their tools", edits={"columns": renamed}),
        )
    if left_out.reason == "role":
        others = "" if left_out.count == 1 else f"; {rows} have an unknown role"
        seen = f"{first.capitalize()}{whose} has a message of the unknown role {left_out.detail!r}{others}."
        fix = Fix(text=f"change the role in the data; the roles are {_ROLES}")
        return problem(code, option, seen, "", fix)
    seen = f"The column tools of {rows} holds no list of functions with names."
    form = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'
    return problem(code, option, seen, "", Fix(text=f"tools are written as {form}"))


def _source(config: Config, name: str) -> str:
    """Return what a column is called in the data."""
    return next((old for old, new in (config.columns or {}).items() if new == name), name)


def _left_out(facts: Facts) -> list[Problem]:
    """A word on rows that have no usable prompt, while others do."""
    sets = dict.fromkeys(left_out.where for left_out in facts.left_out)
    problems = []
    for where in sets:
        shown = left_words(facts, where)
        is_told = facts.data_problem is not None if where else facts.num_prompts == 0
        if not shown or is_told:
            continue
        problems.append(
            warning(
                "W111",
                "val_dataset" if where else "dataset",
                f"{f'{where}: ' if where else ''}{shown}.",
                "",
                Fix(text="mend these rows, or take them out"),
            )
        )
    return problems


def _unread(facts: Facts) -> list[Problem]:
    if not facts.unread_columns:
        return []
    one = len(facts.unread_columns) == 1
    return [
        warning(
            "W140",
            "dataset",
            f"{'The column' if one else 'The columns'} {', '.join(facts.unread_columns)} "
            f"{'holds' if one else 'hold'} bytes; rewards are not given {'it' if one else 'them'}.",
            "",
            Fix(text="if it is text, write it as text (a string column) into the file"),
        )
    ]


def _unused(facts: Facts) -> list[Problem]:
    if not facts.unused_columns:
        return []
    one = len(facts.unused_columns) == 1
    return [
        warning(
            "W141",
            "dataset",
            f"{'The column' if one else 'The columns'} {', '.join(facts.unused_columns)} "
            f"{'is' if one else 'are'} not used: a prompt string goes to the model as it is.",
            "",
            Fix(text="--apply_chat_template true makes each prompt a user message of the chat template"),
        )
    ]


def _columns(config: Config, facts: Facts) -> list[Problem]:
    missing, columns = facts.missing_columns or (), facts.columns or ()
    if facts.preference_pairs:
        return [_pairs(columns)]
    renames = {_source(config, m.rename[0]): m.rename[1] for m in missing if m.rename is not None}
    edits = {"columns": {**(config.columns or {}), **renames}}
    return [_column(m, columns, edits) for m in missing]


def _pairs(columns: tuple[str, ...]) -> Problem:
    return problem(
        "E363",
        "dataset",
        f"The rows are pairs of a better and a worse answer. There are: {', '.join(columns)}.",
        "",
        Fix(text="rows with a prompt and an answer to compare with, in the columns question and solution"),
        Fix(text="for pairs, a trainer of preferences (DPO), such as that of TRL or ms-swift"),
    )


def _column(missing: MissingColumn, columns: tuple[str, ...], edits: dict[str, Any]) -> Problem:
    *some, last = missing.column.split(" or ")
    names = f"{', '.join(some)} or {last}" if some else last
    there = f" There are: {', '.join(columns)}." if columns and not missing.where else ""
    target = "question" if missing.needed_by == "every prompt" else missing.column.split(" or ")[0]
    if missing.rename is not None:
        fixes = [Fix(text=f"rename {missing.rename[0]} to {target}", edits=edits)]
    else:
        example = flags({"columns": {"NAME": target}})
        fixes = [
            Fix(text=f"add a column {target}"),
            Fix(text=f"if another column holds it, name it in place of NAME: {example}"),
        ]
    of = f" in the set {missing.where}" if missing.where else ""
    return problem(
        "E303",
        "val_dataset" if missing.where else "dataset",
        f"No column {names}{of}, which {missing.needed_by} needs.{there}",
        "",
        *fixes,
    )
