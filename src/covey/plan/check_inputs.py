"""What is wrong with model, data and rewards, and whether prompts and completions fit into the context."""

from __future__ import annotations

from covey.codes import CODES
from covey.config.names import nearest
from covey.config.schema import Config
from covey.plan.facts import Facts, MissingColumn
from covey.plan.shape import counted
from covey.types import Fix, Problem, Severity


def input_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about model, data and rewards say against the configuration."""
    return [
        *_model(config, facts),
        *_dataset(facts),
        *_columns(facts),
        *_lengths(config, facts),
        *_rewards(config, facts),
    ]


def _problem(code: str, option: str, seen: str, cause: str, *fixes: Fix) -> Problem:
    return Problem(code=code, option=option, seen=seen, why=CODES[code].why, cause=cause, fixes=fixes)


def _model(config: Config, facts: Facts) -> list[Problem]:
    if facts.model_problem is None:
        return []
    return [
        _problem(
            "E301",
            "model",
            f"{config.model}: {facts.model_problem}",
            "A path from another machine or directory, or a name on a hub; this version reads local "
            "directories.",
            Fix(text="download it first: `hf download NAME --local-dir DIR`, then --model DIR"),
            Fix(text="the built-in model", edits={"model": "quickstart"}),
        )
    ]


def _dataset(facts: Facts) -> list[Problem]:
    problems = [
        _problem(
            "E302",
            "dataset",
            f"{path} does not exist.",
            "A misspelt path, or one relative to another directory.",
            Fix(text="give the path from here, or from /"),
        )
        for path in facts.dataset_missing or ()
    ]
    problems += [
        _problem(
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
            _problem(
                "E309",
                "dataset",
                f"The data set has {counted(facts.num_rows or 0, 'row')} and no usable prompt.",
                "An empty file, or rows whose prompt is empty.",
                Fix(text='each row needs a prompt: {"prompt": "...", "solution": "..."}'),
            )
        )
    return problems


def _columns(facts: Facts) -> list[Problem]:
    return [_column(missing, facts.columns or ()) for missing in facts.missing_columns or ()]


def _column(missing: MissingColumn, columns: tuple[str, ...]) -> Problem:
    near = nearest(missing.column, columns)
    there = f" There are: {', '.join(columns)}." if columns else ""
    fix = f"rename {near} to {missing.column}" if near else f"add a column {missing.column}"
    return _problem(
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
    return _problem(
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
        _problem(
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
    problem = _problem(
        "W105",
        "max_length",
        f"{counted(facts.num_prompts_too_long or 0, 'prompt')} of {facts.num_rows or '?'} are longer than "
        f"{_limit(config, facts)} and are left out.",
        "A few long rows; the others are not touched.",
        Fix(text="raise --max_length, or lower --max_completion_length, to keep them"),
    )
    return _as_warning(problem)


def _as_warning(problem: Problem) -> Problem:
    return Problem(
        code=problem.code,
        option=problem.option,
        seen=problem.seen,
        why=problem.why,
        cause=problem.cause,
        fixes=problem.fixes,
        severity=Severity.WARNING,
    )


def _rewards(config: Config, facts: Facts) -> list[Problem]:
    problems = [
        _unknown_reward(config, n, facts.rewards_available)
        for n in config.reward_funcs
        if facts.rewards_available is not None and n not in facts.rewards_available
    ]
    return [*problems, *_weights(config)]


def _unknown_reward(config: Config, name: str, available: tuple[str, ...] | None) -> Problem:
    names = tuple(available or ())
    near = nearest(name, names)
    fixes = [Fix(text=f"there are: {', '.join(names)}" if names else "there is none in this version")]
    if near is not None:
        edits = {"reward_funcs": [near if n == name else n for n in config.reward_funcs]}
        fixes.insert(0, Fix(text=f"the nearest is {near}", edits=edits))
    return _problem(
        "E306",
        "reward_funcs",
        f"There is no reward {name}.",
        f"The nearest name is {near}." if near else "A reward of another tool, or a misspelt name.",
        *fixes,
    )


def _weights(config: Config) -> list[Problem]:
    funcs, weights = config.reward_funcs, config.reward_weights
    if not funcs:
        return []
    ones = Fix(text="every reward counts the same", edits={"reward_weights": [1.0] * len(funcs)})
    if len(weights) != len(funcs):
        return [
            _problem(
                "E307",
                "reward_weights",
                f"{counted(len(weights), 'weight')} for {counted(len(funcs), 'reward')}: "
                f"{', '.join(f'{w:g}' for w in weights) or 'none'} for {', '.join(funcs)}.",
                "A reward was added or taken away, and the weights were not.",
                ones,
            )
        ]
    if not any(weights):
        return [
            _problem(
                "E308",
                "reward_weights",
                f"Every weight is 0: {', '.join(funcs)}.",
                "Weights set to 0 to watch a reward without training on it; one has to count.",
                ones,
            )
        ]
    return []
