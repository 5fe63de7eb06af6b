"""What is wrong with the data, and whether prompts and completions fit into the context."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

from covey.options.schema import Config
from covey.plan.check_rows import left_words, row_problems
from covey.plan.facts import Facts, UnreadableFile
from covey.plan.problem import problem, warning
from covey.plan.reasons import REFUSED
from covey.plan.shape import counted
from covey.types import Fix, Problem


def data_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the data say against the configuration."""
    return [
        *_dataset(config, facts),
        *_mixed(config, facts),
        *row_problems(config, facts),
        *_lengths(config, facts),
    ]


def _dataset(config: Config, facts: Facts) -> list[Problem]:
    problems = [
        problem(
            "E302",
            _option_of(config, path),
            f"{path} does not exist.",
            "A misspelt path, or one relative to another directory.",
            Fix(text=f"`ls {shlex.quote(os.path.dirname(path) or '.')}` shows what is there"),
            Fix(text="an id on a hub has no file ending and does not begin with ./ or /"),
        )
        for path in facts.dataset_missing or ()
    ]
    problems += [_unreadable(config, file) for file in facts.dataset_unreadable or ()]
    is_explained = problems or facts.missing_columns or facts.media_columns or facts.num_prompts_too_long
    is_explained = is_explained or any(rows.reason in REFUSED for rows in facts.left_out)
    is_explained = is_explained or (facts.pass_rates is not None and facts.pass_rates.num_rows)
    if config.dataset and facts.num_prompts == 0 and not is_explained:
        left = left_words(facts)
        problems.append(
            problem(
                "E309",
                "dataset",
                f"The data set has {counted(facts.num_rows or 0, 'row')} and no usable prompt"
                f"{f': {left}' if left else ''}.",
                "",
                Fix(text=_mend(facts)),
            )
        )
    return problems


_CUT_EMOJI = "write the text anew: an emoji was cut in two, as in \\ud83d without its \\ude00"


def _mend(facts: Facts) -> str:
    """Return what to do about rows of which none is usable."""
    reasons = {rows.reason for rows in facts.left_out if not rows.where}
    if reasons == {"surrogate"}:
        return _CUT_EMOJI
    if facts.unread_columns:
        names = ", ".join(facts.unread_columns)
        return f"a prompt is text, and {names} holds bytes: write it as text (a string column) into the file"
    return 'each row needs a prompt: {"question": "What is 1+1?", "solution": "2"}'


def _option_of(config: Config, path: str) -> str:
    """Return the option that names a path or an id: dataset, or val_dataset where only that one does."""
    named = any(path in text for text in config.dataset)
    return "val_dataset" if not named and any(path in text for text in config.val_dataset) else "dataset"


def _unreadable(config: Config, file: UnreadableFile) -> Problem:
    option = _option_of(config, file.path)
    plain = file.words.removeprefix(f"{os.path.normpath(file.path)}, ")
    seen = f"{file.path} cannot be read: {plain}"
    if plain.startswith(f"{os.path.normpath(file.path)} "):
        seen = plain
    line = re.match(r"line (\d+)", plain)
    if "UTF-8" in plain:
        encoding = "UTF-16" if "UTF-16" in plain else "ENCODING"
        convert = f"iconv -f {encoding} -t UTF-8 {shlex.quote(file.path)} > NEW"
        fixes = (Fix(text=f"`{convert}` writes it as UTF-8"),)
    elif line is not None:
        show = f"sed -n {line[1]}p {shlex.quote(file.path)}"
        fixes = (Fix(text=f"`{show}` shows the line; mend it, or take it out"),)
    elif "no subsets or splits" in plain:
        typed = [_without_parts(text, file.path) for text in getattr(config, option)]
        fixes = (Fix(text="the whole file", edits={option: typed}),)
    elif "surrogate" in plain:
        fixes = (Fix(text=_CUT_EMOJI),)
    elif "Arrow type" in plain:
        fixes = (Fix(text="write this column as text or numbers, or leave it out of the file"),)
    else:
        fixes = (Fix(text="write it anew as .jsonl: one JSON object on each line"),)
    return problem("E302", option, seen, "", *fixes)


def _without_parts(text: str, path: str) -> str:
    """Return a source without its subset and split."""
    before, there, after = text.partition(path)
    _, mark, limit = after.partition("#")
    return f"{before}{path}{mark}{limit}" if there else text


_ADVICE: Mapping[str, str] = {
    "columns": 'the name in the data comes first: --columns \'{"NAME": "question"}\'',
    "system": "the words themselves, or a file of UTF-8 text",
    "split_dataset_ratio": "a set of its own: --val_dataset FILE",
    "streaming": "read all rows before the run",
    "val_dataset": "another set: --val_dataset FILE",
    "dataset": "as in openai/gsm8k:main@train#100: subset main, split train, 100 of its rows",
}


def _mixed(config: Config, facts: Facts) -> list[Problem]:
    problems = []
    if facts.hub_problem is not None:
        problems.append(_hub(config, facts.hub_problem))
    # What is wrong with the probabilities is said of the option itself.
    if facts.data_problem is not None and not facts.data_problem.startswith("interleave_prob"):
        option = _option_in(config, facts.data_problem)
        fix = Fix(text=_ADVICE[option], edits={"streaming": False} if option == "streaming" else {})
        problems.append(problem("E302", option, facts.data_problem, "", fix))
    return problems


def _option_in(config: Config, words: str) -> str:
    """Return the option that the words about the rows speak of."""
    first = words.partition(" ")[0]
    if first in _ADVICE:
        return first
    if "--streaming" in words:
        return "streaming"
    if words.startswith("the set to evaluate on"):
        return "val_dataset"
    if config.columns and "column" in words:
        return "columns"
    return _option_of(config, first.rstrip(":"))


def _hub(config: Config, words: str) -> Problem:
    name = words.partition(" ")[0].rstrip(":")
    option = _option_of(config, name)
    fixes = [Fix(text=f"a file instead: --{option} FILE.jsonl")]
    if any(f"ms::{name}" in text for text in getattr(config, option)) or not config.use_hf:
        get = f"modelscope download --dataset {name}"
    else:
        get = f"hf download {name} --repo-type dataset"
    if "HF_HUB_OFFLINE" in words:
        cause = "HF_HUB_OFFLINE keeps every command off the network, and this data set was never fetched."
        fixes.insert(0, Fix(text=f"with a network: `unset HF_HUB_OFFLINE`, or once `{get}`"))
    else:
        cause = "No network from here, a name that is misspelt, or a data set that asks for a login."
        fixes.insert(0, Fix(text=f"where there is a network `{get}`, then this command again"))
    return problem("E321", option, words, cause, *fixes)


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
    prompts = counted(facts.num_prompts_too_long or 0, "prompt")
    seen = f"All {prompts} are longer than {limit}."
    if config.max_length is None and context is not None and config.max_completion_length >= context:
        seen = (
            f"max_completion_length {config.max_completion_length} takes the whole context of the model, "
            f"{context} tokens; no room is left for any of the {prompts}."
        )
    elif longest is not None:
        seen += f" The longest has {counted(longest, 'token')}."
    return problem(
        "E304",
        "max_length",
        seen,
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
