"""Finds faults in the data, and whether prompts and completions fit into the context."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from covey.checks.check import Check
from covey.checks.data.codes import CODES
from covey.checks.data.rows import left_words, row_problems
from covey.options.schema import Config
from covey.plan.facts import DataFacts, Facts, HubProblem, ModelFacts, PromptFacts, UnreadableFile
from covey.plan.problem import problem, warning
from covey.plan.reasons import REFUSED
from covey.texts import Whole, counted, tr
from covey.types import Fix, Problem


def data_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the data say against the configuration."""
    return [
        *_dataset(config, facts.data, facts.prompts),
        *_mixed(config, facts.data),
        *row_problems(config, facts.data, facts.prompts),
        *_lengths(config, facts),
    ]


def _dataset(config: Config, data: DataFacts, prompts: PromptFacts) -> list[Problem]:
    problems = [
        problem(
            "E302",
            _option_of(config, path),
            tr("{path} does not exist.", path=path),
            "",
            Fix(
                text=tr(
                    "`ls {directory}` shows what is there",
                    directory=shlex.quote(os.path.dirname(path) or "."),
                )
            ),
            Fix(text=tr("for a data set on a hub, give its id, without ./ or a file extension: owner/name")),
        )
        for path in data.missing_paths or ()
    ]
    problems += [_unreadable(config, file) for file in data.unreadable or ()]
    is_explained = problems or data.missing_columns or data.media_columns or prompts.num_too_long
    is_explained = is_explained or any(rows.reason in REFUSED for rows in data.left_out)
    is_explained = is_explained or (data.pass_rates is not None and data.pass_rates.num_rows)
    if config.dataset and prompts.num_used == 0 and not is_explained:
        problems.append(problem("E309", "dataset", _unusable(data), "", Fix(text=_mend(data))))
    return problems


def _unusable(data: DataFacts) -> str:
    if data.num_rows == 0:
        return tr("The dataset is empty: it has no rows.")
    left = left_words(data)
    return tr(
        "The dataset has {rows} but no usable prompt{words}.",
        rows=counted(data.num_rows or 0, "row"),
        words=tr(": {left}", left=left) if left else "",
    )


_CUT_EMOJI = tr(
    "write the text again: a character was cut in two, such as an emoji with \\ud83d but without its \\ude00"
)


def _mend(data: DataFacts) -> str:
    """Return what to do about rows of which none is usable."""
    reasons = {rows.reason for rows in data.left_out if not rows.where}
    if reasons == {"surrogate"}:
        return _CUT_EMOJI
    if reasons == {"only_answers"}:
        return tr("give the message that the model answers the role user")
    if data.num_rows == 0:
        return tr('write rows into it, as {"question": "What is 1+1?", "solution": "2"}')
    if data.unread_columns:
        names = ", ".join(data.unread_columns)
        return tr(
            "a prompt must be text, but {names} holds bytes: write it into the file as text (a "
            "string column)",
            names=names,
        )
    return tr('give each row a prompt: {"question": "What is 1+1?", "solution": "2"}')


def _option_of(config: Config, path: str) -> str:
    """Return the option that names a path or an id: dataset, or val_dataset where only that one does."""
    named = any(path in text for text in config.dataset)
    return "val_dataset" if not named and any(path in text for text in config.val_dataset) else "dataset"


def _unreadable(config: Config, file: UnreadableFile) -> Problem:
    option = _option_of(config, file.path)
    is_named = file.subject == os.path.normpath(file.path)
    words = file.within if is_named and file.within else file.words
    if not is_named or file.within:
        words = tr("{path} cannot be read: {words}", path=file.path, words=words)
    return problem("E302", option, words, "", _mended(config, file, option))


def _mended(config: Config, file: UnreadableFile, option: str) -> Fix:
    """Return what to do about a file that cannot be read."""
    match file.kind:
        case "encoding":
            convert = Whole(f"iconv -f {file.encoding or 'ENCODING'} -t UTF-8 {shlex.quote(file.path)} > NEW")
            return Fix(text=tr("`{convert}` writes it as UTF-8", convert=convert))
        case "line":
            show = Whole(f"sed -n {file.line}p {shlex.quote(file.path)}")
            return Fix(text=tr("`{show}` shows the line; correct or remove it", show=show))
        case "one_file":
            typed = [_without_parts(text, file.path) for text in getattr(config, option)]
            return Fix(text=tr("read the whole file"), edits={option: typed})
        case "surrogate":
            return Fix(text=_CUT_EMOJI)
        case "arrow_type":
            return Fix(text=tr("write this column as text or numbers, or remove it from the file"))
        case _:
            return Fix(text=tr("write it again as .jsonl, with one JSON object on each line"))


def _without_parts(text: str, path: str) -> str:
    """Return a source without its subset and split."""
    before, there, after = text.partition(path)
    _, mark, limit = after.partition("#")
    return f"{before}{path}{mark}{limit}" if there else text


_ADVICE: Mapping[str, str] = {
    "columns": tr('write the name in the data first, then the new name: --columns \'{"NAME": "question"}\''),
    "system": tr("give the text itself, or a file with UTF-8 text"),
    "split_dataset_ratio": tr("use a separate dataset: --val_dataset FILE"),
    "streaming": tr("read all rows before the run starts"),
    "max_pixels": tr("leave out max_pixels and image_max_token_num: the model's own files have limits"),
    "val_dataset": tr("use another dataset: --val_dataset FILE"),
    "dataset": tr("for example openai/gsm8k:main@train#100 for subset main, split train, 100 of its rows"),
}


def _mixed(config: Config, data: DataFacts) -> list[Problem]:
    problems = []
    if data.hub_problem is not None:
        problems.append(_hub(config, data.hub_problem))
    # What is wrong with the probabilities is said of the option itself.
    if data.problem is not None and data.problem.option != "interleave_prob":
        option = data.problem.option or _option_of(config, data.problem.source)
        fix = Fix(text=_ADVICE[option], edits={"streaming": False} if option == "streaming" else {})
        if data.problem.columns is not None:
            names = dict(data.problem.columns)
            fix = Fix(text=tr("these names work"), edits={"columns": names})
        problems.append(problem("E302", option, data.problem.words, "", fix))
    return problems


def _hub(config: Config, hub: HubProblem) -> Problem:
    option = _option_of(config, hub.name)
    fixes = [Fix(text=tr("use a file instead: --{option} FILE.jsonl", option=option))]
    if any(f"ms::{hub.name}" in text for text in getattr(config, option)) or not config.use_hf:
        get = f"modelscope download --dataset {hub.name}"
    else:
        get = f"hf download {hub.name} --repo-type dataset"
    if hub.is_offline:
        cause = tr("HF_HUB_OFFLINE is set, so nothing is downloaded, and this dataset is not in the cache.")
        fixes.insert(
            0,
            Fix(
                text=tr(
                    "on a machine with network access: `unset HF_HUB_OFFLINE`, or download it once "
                    "with `{get}`",
                    get=get,
                )
            ),
        )
    else:
        cause = tr("There is no network, the name is misspelt, or the dataset requires a login.")
        fixes.insert(
            0, Fix(text=tr("on a machine with network access run `{get}`, then this command again", get=get))
        )
    return problem("E321", option, hub.words, cause, *fixes)


def _lengths(config: Config, facts: Facts) -> list[Problem]:
    if _nothing_short_enough(facts.prompts):
        return [_all_too_long(config, facts)]
    problems = _context(config, facts.model, facts.prompts)
    if facts.prompts.num_too_long and facts.prompts.num_used:
        problems.append(_left_out(config, facts.model, facts.data, facts.prompts))
    return problems


def _nothing_short_enough(prompts: PromptFacts) -> bool:
    return prompts.num_used == 0 and bool(prompts.num_too_long)


def _all_too_long(config: Config, facts: Facts) -> Problem:
    limit = _limit(config, facts.model)
    longest, context = facts.prompts.longest_in_data, facts.model.context
    fixes = []
    if longest is not None and (context is None or longest + config.max_completion_length <= context):
        fixes.append(Fix(text=tr("make room for every prompt of the data"), edits={"max_length": longest}))
    elif longest is not None and context is not None and longest < context:
        edits = {"max_length": longest, "max_completion_length": context - longest}
        fixes.append(Fix(text=tr("make room for every prompt, with shorter completions"), edits=edits))
    fixes.append(Fix(text=tr("use shorter prompts, or a model with a longer context")))
    prompts = counted(facts.prompts.num_too_long or 0, "prompt")
    seen = tr("All {prompts} are longer than {limit}.", prompts=prompts, limit=limit)
    if config.max_length is None and context is not None and config.max_completion_length >= context:
        seen = tr(
            "max_completion_length {max_completion_length} takes the whole context of the model "
            "({context} tokens), so none of the {prompts} fits.",
            max_completion_length=config.max_completion_length,
            context=context,
            prompts=prompts,
        )
    elif longest is not None:
        seen += tr(" The longest has {tokens}.", tokens=counted(longest, "token"))
    return problem(
        "E304",
        "max_length",
        seen,
        tr("max_length counts the tokens of the rendered prompt, including the chat template.")
        if config.max_length is not None
        else tr("The limit is what max_completion_length leaves of the model's context."),
        *fixes,
    )


def _limit(config: Config, model: ModelFacts) -> str:
    if config.max_length is not None:
        return tr("max_length {max_length}", max_length=config.max_length)
    if model.context is None:
        return tr("the limit")
    room = model.context - config.max_completion_length
    return tr(
        "context {model_context} - max_completion_length {max_completion_length} = {room} tokens",
        model_context=model.context,
        max_completion_length=config.max_completion_length,
        room=room,
    )


def _context(config: Config, model: ModelFacts, prompts: PromptFacts) -> list[Problem]:
    context, prompt = model.context, prompts.longest or 1
    completion = config.max_completion_length
    if context is None or completion < 1 or prompt + completion <= context:
        return []
    fixes = []
    if prompt < context:
        fixes.append(
            Fix(text=tr("allow only shorter completions"), edits={"max_completion_length": context - prompt})
        )
    if prompts.longest is not None and completion < context:
        fixes.append(
            Fix(text=tr("leave out the longest prompts"), edits={"max_length": context - completion})
        )
    known = (
        tr("longest prompt {prompt}", prompt=prompt)
        if prompts.longest is not None
        else tr("a prompt of at least 1 token")
    )
    return [
        problem(
            "E305",
            "max_completion_length",
            tr(
                "{known} + max_completion_length {completion} = {prompt} tokens, but the context "
                "of the model is {context}.",
                known=known,
                completion=completion,
                prompt=prompt + completion,
                context=context,
            ),
            tr("The value is a default, or was chosen for a model with a longer context."),
            *fixes,
            Fix(text=tr("use a model with a longer context")),
        )
    ]


def _left_out(config: Config, model: ModelFacts, data: DataFacts, prompts: PromptFacts) -> Problem:
    return warning(
        "W105",
        "max_length",
        tr(
            "{prompts} of {num_rows} are longer than {limit} and are left out.",
            prompts=counted(prompts.num_too_long or 0, "prompt"),
            num_rows=data.num_rows or "?",
            limit=_limit(config, model),
        ),
        "",
        Fix(text=tr("to keep them, raise --max_length or lower --max_completion_length")),
        *([Fix(text=tr("or take smaller images: --max_pixels N"))] if prompts.has_images else []),
    )


CHECK = Check(place=120, judge=lambda config, facts, _: data_problems(config, facts), codes=CODES)
