"""Finds faults in the rewards that are no functions: models that score, and the judge behind a service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from covey.config.names import nearest
from covey.options.schema import Config, default_of
from covey.plan.facts import DataFacts, PromptFacts, RewardFacts, RewardModelFacts
from covey.plan.problem import problem, warning
from covey.texts import joined, tr
from covey.types import Fix, Problem

_ASKS = (
    "Rate the answer to the question from 0 to 10. Question: {prompt} Answer: {completion} End with Reward: N"
)
_TRAIN = tr(
    "train one with TRL's RewardTrainer, or use one whose architecture ends in ForSequenceClassification"
)

# By the kind of fault: what is likely, and what to do.
_FAULTS: Mapping[str, tuple[str, str]] = {
    "causal": (
        tr("This is a language model, not a reward model; only a trained classification head gives a score."),
        tr("for a judge that writes its verdict use --reward_funcs judge; otherwise {train}", train=_TRAIN),
    ),
    "not_classifier": (tr("The model is for another task, or has a custom head."), _TRAIN),
    "labels": (tr("The model classifies into several classes; a reward model has one output."), _TRAIN),
    "remote_code": (
        tr("The model needs code of its own, which covey does not run."),
        tr("use a reward model that transformers supports without extra code"),
    ),
    "hub": (
        tr("The path or id is misspelt, or the hub cannot be reached."),
        tr(
            "`ls .` shows the directories here; `hf download ENTRY` downloads a model from the hub "
            "on a machine with network access"
        ),
    ),
    "file": ("", tr("give the directory that holds config.json, tokenizer.json and *.safetensors")),
    "pickled_weights": (
        tr("The model is old; weights in this format can run code when they are loaded."),
        tr("convert them: AutoModelForSequenceClassification.from_pretrained(DIR).save_pretrained(DIR)"),
    ),
    "no_tokenizer": (
        tr("The weights were saved without a tokenizer."),
        tr("save the tokenizer beside them: AutoTokenizer.from_pretrained(ID).save_pretrained(DIR)"),
    ),
    "weights": (
        tr("config.json and the weights come from different saves, or the model was saved only in part."),
        tr("download or save the reward model again"),
    ),
    "damaged": (tr("The download or the copy was interrupted."), tr("download or copy the file again")),
}
_MAIN = "main"
_OTHERS = (tr("The path or id is misspelt, or files were not copied."), tr("`ls DIR` shows what is there"))


def reward_model_problems(config: Config, prompts: PromptFacts, rewards: RewardFacts) -> list[Problem]:
    """Return what the facts say against the reward models."""
    problems = [_unusable(config, model) for model in rewards.models if model.problem is not None]
    problems += _revisions(config, rewards)
    whole = [model for model in rewards.models if model.problem is None]
    if prompts.are_text is False or config.apply_chat_template:
        problems += [_without_template(config, m) for m in whole if not m.has_template]
    return problems


def context_warnings(config: Config, prompts: PromptFacts, rewards: RewardFacts) -> list[Problem]:
    """Return a warning for each reward model whose context is shorter than a row may be."""
    if prompts.longest is None:
        return []
    longest = prompts.longest + config.max_completion_length
    return [
        warning(
            "W125",
            _option(config, model),
            tr(
                "{entry} reads at most {context} tokens, but a prompt with its completion may have "
                "{longest}.",
                entry=model.entry,
                context=model.context,
                longest=longest,
            ),
            "",
            Fix(
                text=tr("allow only shorter completions"),
                edits={"max_completion_length": model.context - prompts.longest},
            )
            if model.context > prompts.longest
            else Fix(text=tr("use a reward model with a longer context")),
        )
        for model in rewards.models
        if model.problem is None and model.context is not None and model.context < longest
    ]


def judge_problems(config: Config, data: DataFacts, rewards: RewardFacts) -> list[Problem]:
    """Return what is wrong with what the reward judge is told."""
    # A key in the address would stand in config.yaml whether or not anybody is asked.
    judge, problems = rewards.judge, _address(config)
    if judge is None:
        return problems
    problems += [*_lacking(config), *_prompt(config, data, rewards)]
    if judge.regex_problem is not None:
        usual = Fix(text=tr("use the usual one"), edits={"judge_regex": default_of("judge_regex")})
        seen = tr(
            "judge_regex is {judge_regex!r}: {regex_problem}.",
            judge_regex=config.judge_regex,
            regex_problem=judge.regex_problem,
        )
        problems.append(
            problem("E342", "judge_regex", seen, tr("A bracket may be missing or not escaped."), usual)
        )
    return problems


def _option(config: Config, model: RewardModelFacts) -> str:
    return "reward_model" if model.entry in config.reward_model else "reward_funcs"


def _unusable(config: Config, model: RewardModelFacts) -> Problem:
    cause, advice = _FAULTS.get(model.fault, _OTHERS)
    fix = Fix(text=advice.replace("DIR", model.directory or model.entry).replace("ENTRY", model.entry))
    return problem("E337", _option(config, model), tr("{problem}.", problem=model.problem), cause, fix)


def _revisions(config: Config, rewards: RewardFacts) -> list[Problem]:
    models, revisions = config.reward_model, config.reward_model_revision
    if not revisions:
        return []
    local = {m.entry for m in rewards.models if m.directory == os.path.expanduser(m.entry)}
    if len(models) != len(revisions):
        seen = tr(
            "reward_model_revision has {num_revisions} entries, but reward_model has {num_models}; "
            "give one revision for each model.",
            num_revisions=len(revisions),
            num_models=len(models),
        )
        cause = tr("A model was added or removed, or is named in --reward_funcs, which takes no revision.")
    elif ignored := [m for m, r in zip(models, revisions, strict=True) if m in local and r != _MAIN]:
        seen = tr(
            "{ignored} is a directory, and a directory has only the revision {main}.",
            ignored=joined(", ", ignored),
            main=_MAIN,
        )
        cause = tr("The revision belongs to a model on the hub, but a copy on this machine is used.")
    else:
        return []
    without = Fix(text=tr("use the main branches"), edits={"reward_model_revision": []})
    return [problem("E339", "reward_model_revision", seen, cause, without)]


def _without_template(config: Config, model: RewardModelFacts) -> Problem:
    return problem(
        "E338",
        _option(config, model),
        tr("{entry} has no chat template, but the prompts are messages.", entry=model.entry),
        tr("The model was trained on plain text, or its template was not saved with its tokenizer."),
        Fix(text=tr("put its chat_template.jinja into {directory}", directory=model.directory)),
        Fix(text=tr("use prompts that are text, in the column prompt: both models then read the same text")),
    )


def _lacking(config: Config) -> list[Problem]:
    lacking = [n for n in ("judge_base_url", "judge_model", "judge_prompt") if not getattr(config, n)]
    if not lacking:
        return []
    examples = {"judge_base_url": "http://127.0.0.1:8000/v1", "judge_model": "NAME", "judge_prompt": _ASKS}
    words = " ".join(f"--{n} '{examples[n]}'" for n in lacking)
    seen = tr(
        "The reward judge is used, but these options are missing: {lacking}.", lacking=joined(", ", lacking)
    )
    cause = tr("None of these options has a default.")
    return [problem("E340", lacking[0], seen, cause, Fix(text=tr("for example {words}", words=words)))]


def _address(config: Config) -> list[Problem]:
    url = config.judge_base_url
    fault = _url_fault(url) if url else None
    if fault is None:
        return []
    cause = ""
    fix = Fix(
        text=tr(
            "for example --judge_base_url http://127.0.0.1:8000/v1; a key is given in the environment "
            "variable OPENAI_API_KEY"
        )
    )
    return [problem("E340", "judge_base_url", tr("judge_base_url {fault}.", fault=fault), cause, fix)]


def _url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return tr("is not an address: {error}", error=error)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # Its value is not repeated: a key may stand in it.
        return tr("has more parts than http(s)://HOST:PORT/PATH; keys and passwords must not be in it")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        return tr("is {url!r}, which does not have the form http(s)://HOST:PORT/PATH", url=url)
    return tr("has port 0") if port == 0 else None


def _prompt(config: Config, data: DataFacts, rewards: RewardFacts) -> list[Problem]:
    assert rewards.judge is not None
    if rewards.judge.prompt_problem is not None:
        cause = tr("The text does not contain the completion, or a path is misspelt.")
        fix = Fix(text=tr("for example --judge_prompt '{asks}'", asks=_ASKS))
        return [
            problem(
                "E341",
                "judge_prompt",
                tr("{prompt_problem}.", prompt_problem=rewards.judge.prompt_problem),
                cause,
                fix,
            )
        ]
    names = [*(data.columns or ()), "prompt", "completion"]
    return [
        problem(
            "E341",
            "judge_prompt",
            tr(
                "judge_prompt has {{{name}}}, but the data has no such column; its columns are {names}.",
                name=name,
                names=joined(", ", names),
            ),
            tr("The column is misspelt, or belongs to another dataset."),
            Fix(
                text=tr("the nearest column is {{{near}}}", near=near)
                if (near := nearest(name, names))
                else tr("use a column of the data")
            ),
            Fix(text=tr("to write the word in braces literally: {{{{{name}}}}}", name=name)),
        )
        for name in rewards.judge.unknown
    ]
