"""What is wrong with the data, and whether prompts and completions fit into the context."""

from __future__ import annotations

from covey.config.names import nearest
from covey.config.schema import Config
from covey.plan.facts import Facts, MissingColumn
from covey.plan.problem import problem, warning
from covey.plan.reasons import REASONS
from covey.plan.shape import counted
from covey.types import Fix, Problem


def data_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the data say against the configuration."""
    return [
        *_dataset(facts),
        *_mixed(config, facts),
        *_columns(facts),
        *_media(facts),
        *_lengths(config, facts),
        *_rows(facts),
    ]


def _dataset(facts: Facts) -> list[Problem]:
    problems = [
        problem(
            "E302",
            "dataset",
            f"{path} does not exist.",
            "A misspelt path, or one relative to another directory.",
            Fix(text="give the path from here, or from /"),
        )
        for path in facts.dataset_missing or ()
    ]
    problems += [
        problem(
            "E302",
            "dataset",
            f"{file.path} cannot be read: {file.words}",
            "A file cut short, or of another format.",
            Fix(text="mend the line that is named, or write the file anew"),
        )
        for file in facts.dataset_unreadable or ()
    ]
    empty = facts.num_prompts == 0 and not facts.num_prompts_too_long
    if empty and not problems and not facts.missing_columns:
        problems.append(
            problem(
                "E309",
                "dataset",
                f"The data set has {counted(facts.num_rows or 0, 'row')} and no usable prompt.",
                "An empty file, or rows whose prompt is empty.",
                Fix(text='each row needs a prompt: {"prompt": "...", "solution": "..."}'),
            )
        )
    return problems


def _mixed(config: Config, facts: Facts) -> list[Problem]:
    problems = []
    if facts.hub_problem is not None:
        problems.append(
            problem(
                "E321",
                "dataset",
                facts.hub_problem,
                "No network from here, a name that is misspelt, or a data set that asks for a login.",
                Fix(text="where there is a network: `hf download NAME --repo-type dataset`, then the same"),
                Fix(text="a file instead: --dataset FILE.jsonl"),
            )
        )
    if facts.data_problem is not None:
        option = "columns" if config.columns and "column" in facts.data_problem else "dataset"
        problems.append(
            problem(
                "E302",
                option,
                facts.data_problem,
                "A name or a number that does not fit what the data set holds.",
                Fix(text=f"mend --{option}; docs/data.md has the syntax"),
            )
        )
    return problems


def _media(facts: Facts) -> list[Problem]:
    if not facts.media_columns:
        return []
    return [
        problem(
            "E312",
            "dataset",
            f"The data holds images, audio or video: {', '.join(facts.media_columns)}.",
            "A data set for vision models.",
            Fix(text="a data set of text alone, or this one without these rows and columns"),
        )
    ]


def _rows(facts: Facts) -> list[Problem]:
    """A word on rows that have no usable prompt, while others do."""
    left = [found for found in facts.left_out if found.reason not in ("too_long", "cut")]
    if not left or not facts.num_prompts:
        return []
    shown = "; ".join(
        f"{counted(found.count, 'row')} {REASONS.get(found.reason, found.reason)}: "
        f"{', '.join(map(str, found.rows))}{' ...' if found.count > len(found.rows) else ''}"
        for found in left
    )
    return [
        warning(
            "W111",
            "dataset",
            f"{shown}.",
            "Rows that were written without a prompt, or under another column name.",
            Fix(text='mend these rows, or rename a column: --columns \'{"NAME": "question"}\''),
        )
    ]


def _columns(facts: Facts) -> list[Problem]:
    return [_column(missing, facts.columns or ()) for missing in facts.missing_columns or ()]


def _column(missing: MissingColumn, columns: tuple[str, ...]) -> Problem:
    near = nearest(missing.column, columns)
    there = f" There are: {', '.join(columns)}." if columns else ""
    fix = f"rename {near} to {missing.column}" if near else f"add a column {missing.column}"
    return problem(
        "E303",
        "dataset",
        f"No column {missing.column}, which {missing.needed_by} needs.{there}",
        "The data set was made for another tool.",
        Fix(text=fix),
    )


def _lengths(config: Config, facts: Facts) -> list[Problem]:
    if _nothing_short_enough(facts):
        return [_all_too_long(config, facts)]
    problems = _context(config, facts)
    if facts.num_prompts_too_long and facts.num_prompts:
        problems.append(_left_out(config, facts))
    return problems


def _nothing_short_enough(facts: Facts) -> bool:
    return facts.num_prompts == 0 and bool(facts.num_prompts_too_long)


def _all_too_long(config: Config, facts: Facts) -> Problem:
    limit = _limit(config, facts)
    longest, context = facts.longest_prompt_in_data, facts.model_context
    fixes = []
    if longest is not None and (context is None or longest + config.max_completion_length <= context):
        fixes.append(Fix(text="room for every prompt of the data", edits={"max_length": longest}))
    elif longest is not None and context is not None and longest < context:
        edits = {"max_length": longest, "max_completion_length": context - longest}
        fixes.append(Fix(text="room for every prompt, and shorter completions", edits=edits))
    fixes.append(Fix(text="shorter prompts, or a model with a longer context"))
    return problem(
        "E304",
        "max_length",
        f"All {counted(facts.num_prompts_too_long or 0, 'prompt')} are longer than {limit}.",
        "max_length counts the tokens of the rendered prompt, chat template included."
        if config.max_length is not None
        else "The limit is what max_completion_length leaves of the model's context.",
        *fixes,
    )


def _limit(config: Config, facts: Facts) -> str:
    if config.max_length is not None:
        return f"max_length {config.max_length}"
    if facts.model_context is None:
        return "the limit"
    room = facts.model_context - config.max_completion_length
    return (
        f"context {facts.model_context} - max_completion_length {config.max_completion_length} = {room} "
        "tokens"
    )


def _context(config: Config, facts: Facts) -> list[Problem]:
    context, prompt = facts.model_context, facts.longest_prompt or 1
    completion = config.max_completion_length
    if context is None or completion < 1 or prompt + completion <= context:
        return []
    fixes = []
    if prompt < context:
        fixes.append(Fix(text="shorter completions", edits={"max_completion_length": context - prompt}))
    if facts.longest_prompt is not None and completion < context:
        fixes.append(Fix(text="leave the longest prompts out", edits={"max_length": context - completion}))
    known = f"longest prompt {prompt}" if facts.longest_prompt is not None else "a prompt of at least 1"
    return [
        problem(
            "E305",
            "max_completion_length",
            f"{known} + max_completion_length {completion} = {prompt + completion} tokens; the model has "
            f"room for {context}.",
            "A default or a setting for a model with a longer context.",
            *fixes,
            Fix(text="a model with a longer context"),
        )
    ]


def _left_out(config: Config, facts: Facts) -> Problem:
    return warning(
        "W105",
        "max_length",
        f"{counted(facts.num_prompts_too_long or 0, 'prompt')} of {facts.num_rows or '?'} are longer than "
        f"{_limit(config, facts)} and are left out.",
        "A few long rows; the others are not touched.",
        Fix(text="raise --max_length, or lower --max_completion_length, to keep them"),
    )
