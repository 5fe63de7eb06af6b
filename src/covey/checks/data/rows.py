"""Finds faults in the rows of the data and their columns."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.names import free_name
from covey.data.images import IMAGE_COLUMNS
from covey.media.families import FAMILIES
from covey.options.schema import Config
from covey.plan.facts import DataFacts, LeftOut, MissingColumn, PromptFacts
from covey.plan.problem import problem, warning
from covey.plan.reasons import REASONS, REFUSED
from covey.plan.words import flags
from covey.texts import capital, counted, filled, joined, plural, tr
from covey.types import Fix, Problem

_COUNTED_ELSEWHERE = ("too_long", "cut", "media", *REFUSED)
_ROLES = tr("system, user (human), assistant (gpt, bot), tool (observation), function_call, developer")


_IMAGES: Mapping[str, tuple[str, str]] = {
    "image": (
        tr("Images of {rows} cannot be used. In {first}: {detail}."),
        tr(
            "correct these rows, or remove them; relative paths start from the current folder, from "
            "ROOT_IMAGE_DIR, or from the folder of the data file"
        ),
    ),
    "placeholder": (
        tr("The text of {rows} holds a token that stands for an image. In {first}: {detail}."),
        tr("remove it from the text; write <image> where an image of the row stands"),
    ),
    "images_lost": (
        tr("The chat template does not write a place for each image of {rows}. In {first}: {detail}."),
        tr("use a template that writes blocks of type image: the model's own, or --chat_template FILE"),
    ),
}


def row_problems(config: Config, data: DataFacts, prompts: PromptFacts) -> list[Problem]:
    """Return what the facts about rows and columns say against the configuration."""
    return [
        *_columns(config, data),
        *_media(data),
        *(_refused(config, data, left_out) for left_out in data.left_out if left_out.reason in REFUSED),
        *_left_out(data, prompts),
        *_unread(data),
        *_unused(data),
    ]


def left_words(data: DataFacts, where: str = "") -> str:
    """Return how many rows are left out for which reason, and the numbers of the first ones."""
    return joined(
        "; ",
        [
            tr(
                "{rows} {reasons}: {numbers}",
                rows=counted(rows.count, "row"),
                reasons=REASONS.get(rows.reason, rows.reason),
                numbers=numbers(rows),
            )
            for rows in data.left_out
            if rows.where == where and rows.reason not in _COUNTED_ELSEWHERE
        ],
    )


def numbers(left_out: LeftOut) -> str:
    """Return the numbers of the first rows: `4, 9, 11, 12, 20 ...`."""
    return f"{', '.join(map(str, left_out.rows))}{' ...' if left_out.count > len(left_out.rows) else ''}"


def _media(data: DataFacts) -> list[Problem]:
    if not data.media_columns:
        return []
    if data.sees_images and set(data.media_columns) <= set(IMAGE_COLUMNS):
        # What the model lacks to see them is said of the model.
        return []
    rows = next((left for left in data.left_out if left.reason == "media"), None)
    where = ""
    if rows is not None and rows.rows:
        where = plural(rows.count, " (row {numbers})", " (rows {numbers})", numbers=numbers(rows))
    columns = joined(", ", data.media_columns)
    fix = Fix(text=tr("use a data set without media, or remove these rows and columns"))
    if data.sees_images:
        seen = tr(
            "The data holds audio or video, and covey trains on text and images alone: {columns}{where}.",
            columns=columns,
            where=where,
        )
        return [problem("E312", "dataset", seen, "", fix)]
    seen = tr("The data holds images, audio or video: {columns}{where}.", columns=columns, where=where)
    to_see = Fix(text=tr("train a model that sees images: {families}", families=joined(", ", FAMILIES)))
    return [problem("E312", "dataset", seen, tr("The model takes text only."), to_see, fix)]


def _refused(config: Config, data: DataFacts, left_out: LeftOut) -> Problem:
    """A kind of row that is refused: training without what stands there would be another task."""
    option = "val_dataset" if left_out.where else "dataset"
    whose = tr(" of the dataset {where}", where=left_out.where) if left_out.where else ""
    rows = tr(
        "{rows}{whose} ({numbers})",
        rows=counted(left_out.count, "row"),
        whose=whose,
        numbers=numbers(left_out),
    )
    first, code = tr("row {rows}", rows=left_out.rows[0]), REFUSED[left_out.reason]
    if left_out.reason == "lost":
        return _lost(config, left_out, code, option, rows, first)
    if left_out.reason == "tools_lost":
        seen = tr(
            "The chat template does not write the tools of {rows}. In {first}: the tool {detail!r}.",
            rows=rows,
            first=first,
            detail=left_out.detail,
        )
        renamed = _renamed(config, data, "tools", free_name("tools", data.columns or ()))
        return problem(
            code,
            option,
            seen,
            "",
            Fix(text=tr("use a chat template that writes tools: --chat_template FILE")),
            Fix(text=tr("train on these prompts without their tools"), edits={"columns": renamed}),
        )
    if left_out.reason == "role":
        others = "" if left_out.count == 1 else tr("; {rows} have an unknown role", rows=rows)
        seen = tr(
            "{first}{whose} has a message of the unknown role {detail!r}{others}.",
            first=capital(first),
            whose=whose,
            detail=left_out.detail,
            others=others,
        )
        fix = Fix(text=tr("change the role in the data; the roles are {roles}", roles=_ROLES))
        return problem(code, option, seen, "", fix)
    if left_out.reason == "unknown_tool":
        return _unknown_tool(left_out, code, option, rows, first)
    if left_out.reason == "not_continued":
        return _not_continued(config, data, left_out, option, rows)
    if left_out.reason in _IMAGES:
        return _image(left_out, code, option, rows, first)
    seen = tr("The column tools of {rows} does not hold a list of functions with names.", rows=rows)
    form = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'
    return problem(code, option, seen, "", Fix(text=tr("write tools as {form}", form=form)))


def _lost(config: Config, left_out: LeftOut, code: str, option: str, rows: str, first: str) -> Problem:
    seen = tr(
        "The chat template leaves out a message of {rows}. In {first}: the {detail}.",
        rows=rows,
        first=first,
        detail=left_out.detail,
    )
    fixes = [Fix(text=tr("use a chat template that writes every message: --chat_template FILE"))]
    if left_out.role == "system" and config.system is not None:
        fixes.append(Fix(text=tr("leave out --system, or put its text into the user messages")))
    elif left_out.role == "developer":
        fixes.append(Fix(text=tr("give this message the role system")))
    elif left_out.role == "system":
        fixes.append(Fix(text=tr("put the text of this message into the user message")))
    return problem(code, option, seen, "", *fixes)


def _unknown_tool(left_out: LeftOut, code: str, option: str, rows: str, first: str) -> Problem:
    seen = tr(
        "The column tools of {rows} names a tool that the run does not have. In {first}: {detail!r}.",
        rows=rows,
        first=first,
        detail=left_out.detail,
    )
    return problem(code, option, seen, "", Fix(text=tr("add it to --tools, or take it out of the data")))


def _image(left_out: LeftOut, code: str, option: str, rows: str, first: str) -> Problem:
    seen, fix = _IMAGES[left_out.reason]
    return problem(
        code, option, filled(seen, rows=rows, first=first, detail=left_out.detail), "", Fix(text=fix)
    )


def _not_continued(config: Config, data: DataFacts, left_out: LeftOut, option: str, rows: str) -> Problem:
    seen = tr(
        "The prompt of {rows} ends with an assistant message, which the completion should continue. The "
        "chat template does not write this message unchanged at the beginning of the assistant's turn. In "
        "row {first}: {detail}.",
        rows=rows,
        first=left_out.rows[0],
        detail=left_out.detail,
    )
    renamed = _renamed(config, data, "prompt", "messages")
    return problem(
        REFUSED["not_continued"],
        option,
        seen,
        "",
        Fix(text=tr("use a chat template that writes this message as it is: --chat_template FILE")),
        Fix(
            text=tr("if this message is the reference answer, rename the column"), edits={"columns": renamed}
        ),
    )


def _renamed(config: Config, data: DataFacts, old: str, new: str) -> dict[str, str]:
    """Return the renames with one more; a column that has the new name already gets another one."""
    there = set(data.columns or ()) - set(data.made_columns)
    away = {_source(config, new): free_name(new, there)} if new in there else {}
    return {**(config.columns or {}), _source(config, old): new, **away}


def _source(config: Config, name: str) -> str:
    """Return what a column is called in the data."""
    return next((old for old, new in (config.columns or {}).items() if new == name), name)


def _left_out(data: DataFacts, prompts: PromptFacts) -> list[Problem]:
    """A word on rows that have no usable prompt, while others do."""
    sets = dict.fromkeys(left_out.where for left_out in data.left_out)
    problems = []
    for where in sets:
        shown = left_words(data, where)
        is_told = data.problem is not None if where else prompts.num_used == 0
        if not shown or is_told:
            continue
        problems.append(
            warning(
                "W111",
                "val_dataset" if where else "dataset",
                tr("{words}{shown}.", words=tr("{where}: ", where=where) if where else "", shown=shown),
                "",
                Fix(text=tr("correct these rows, or remove them")),
            )
        )
    return problems


def _unread(data: DataFacts) -> list[Problem]:
    if not data.unread_columns:
        return []
    return [
        warning(
            "W140",
            "dataset",
            plural(
                len(data.unread_columns),
                "The column {names} holds bytes, so it is not passed to rewards.",
                "The columns {names} hold bytes, so they are not passed to rewards.",
                names=joined(", ", data.unread_columns),
            ),
            "",
            Fix(text=tr("if it is text, write it as text (a string column) into the file")),
        )
    ]


def _unused(data: DataFacts) -> list[Problem]:
    if not data.unused_columns:
        return []
    return [
        warning(
            "W141",
            "dataset",
            plural(
                len(data.unused_columns),
                "The column {names} is not used: a prompt that is a string is given to the model unchanged.",
                "The columns {names} are not used: a prompt that is a string is given to the model "
                "unchanged.",
                names=joined(", ", data.unused_columns),
            ),
            "",
            Fix(text=tr("--apply_chat_template true makes each prompt a user message of the chat template")),
        )
    ]


def _columns(config: Config, data: DataFacts) -> list[Problem]:
    missing, columns = data.missing_columns or (), data.columns or ()
    if data.has_preference_pairs:
        return [_pairs(columns)]
    renames = {_source(config, m.rename[0]): m.rename[1] for m in missing if m.rename is not None}
    edits = {"columns": {**(config.columns or {}), **renames}}
    renamed = [tr("rename {rename} to {target}", rename=old, target=new) for old, new in renames.items()]
    fix = Fix(text=joined(", ", renamed), edits=edits)
    return [_column(m, columns, fix) for m in missing]


def _pairs(columns: tuple[str, ...]) -> Problem:
    return problem(
        "E363",
        "dataset",
        tr(
            "The rows are pairs of a better and a worse answer. The columns are: {columns}.",
            columns=joined(", ", columns),
        ),
        "",
        Fix(text=tr("use rows with a prompt and a reference answer, in the columns question and solution")),
        Fix(text=tr("for pairs, use a preference trainer (DPO), such as that of TRL or ms-swift")),
    )


def _column(missing: MissingColumn, columns: tuple[str, ...], rename: Fix) -> Problem:
    *some, last = missing.column.split(" or ")
    names = tr("{some} or {last}", some=joined(", ", some), last=last) if some else last
    there = (
        tr(" The columns are: {columns}.", columns=joined(", ", columns))
        if columns and not missing.where
        else ""
    )
    is_prompt = missing.needed_by == "every prompt"
    target = "question" if is_prompt else missing.column.split(" or ")[0]
    if missing.rename is not None:
        fixes = [rename]
    else:
        example = flags({"columns": {"NAME": target}})
        fixes = [
            Fix(text=tr("add a column {target}", target=target)),
            Fix(text=tr("if another column holds it, name it in place of NAME: {example}", example=example)),
        ]
    data = tr("The dataset {where}", where=missing.where) if missing.where else tr("The data")
    if is_prompt:
        seen = tr("{data} has no column with prompts ({names}).{there}", data=data, names=names, there=there)
    else:
        seen = tr(
            "{data} has no column {names}, which {needed_by} needs.{there}",
            data=data,
            names=names,
            needed_by=missing.needed_by,
            there=there,
        )
    return problem("E303", "val_dataset" if missing.where else "dataset", seen, "", *fixes)
