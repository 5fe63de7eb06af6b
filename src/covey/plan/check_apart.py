"""What is wrong with the rewards that are no functions: models that score, and the judge behind a service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from covey.config.names import nearest
from covey.options.schema import Config, default_of
from covey.plan.facts import Facts, RewardModelFacts
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem

_ASKS = (
    "Rate the answer to the question from 0 to 10. Question: {prompt} Answer: {completion} End with Reward: N"
)
_TRAIN = tr("train one with TRL's RewardTrainer, or take one that ends in ForSequenceClassification")

# By the kind of fault: what is likely, and what to do.
_FAULTS: Mapping[str, tuple[str, str]] = {
    "causal": (
        tr("A policy or a judge in the place of a reward model; only a trained head gives a score."),
        tr("a judge that writes its verdict is --reward_funcs judge; else {train}", train=_TRAIN),
    ),
    "not_classifier": (tr("A model for another task, or one with a head of its own."), _TRAIN),
    "labels": (tr("A classifier of several classes; a reward model has one."), _TRAIN),
    "remote_code": (
        tr("A model that brings its own code."),
        tr("a reward model that transformers knows by itself"),
    ),
    "hub": (
        tr("A misspelt path or id, or no way to the hub."),
        tr(
            "`ls .` shows the directories here; `hf download ENTRY` fetches a hub's model where "
            "there is a network"
        ),
    ),
    "pickled_weights": (
        tr("An old model; such weights can run code when they are read."),
        tr("convert them: AutoModelForSequenceClassification.from_pretrained(DIR).save_pretrained(DIR)"),
    ),
    "no_tokenizer": (
        tr("The weights were saved alone."),
        tr("save the tokenizer beside them: AutoTokenizer.from_pretrained(ID).save_pretrained(DIR)"),
    ),
    "weights": (
        tr("config.json and weights of two saves, or a model that was saved in part."),
        tr("fetch or save the reward model again"),
    ),
    "damaged": (tr("A download or a copy that was cut short."), tr("fetch or copy the file again")),
}
_MAIN = "main"
_OTHERS = (tr("A misspelt path or id, or files that were not copied."), tr("`ls DIR` shows what is there"))


def reward_model_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against the reward models."""
    problems = [_unusable(config, model) for model in facts.reward_models if model.problem is not None]
    problems += _revisions(config, facts)
    whole = [model for model in facts.reward_models if model.problem is None]
    if facts.prompts_are_text is False or config.apply_chat_template:
        problems += [_without_template(config, m) for m in whole if not m.has_template]
    return problems


def context_warnings(config: Config, facts: Facts) -> list[Problem]:
    """Return a warning for each reward model whose context is shorter than a row may be."""
    if facts.longest_prompt is None:
        return []
    longest = facts.longest_prompt + config.max_completion_length
    return [
        warning(
            "W125",
            _option(config, model),
            tr(
                "{entry} reads {context} tokens, and a prompt with its completion may have {longest}.",
                entry=model.entry,
                context=model.context,
                longest=longest,
            ),
            tr("A reward model for shorter texts."),
            Fix(
                text=tr("shorter completions"),
                edits={"max_completion_length": model.context - facts.longest_prompt},
            )
            if model.context > facts.longest_prompt
            else Fix(text=tr("a reward model with a longer context")),
        )
        for model in facts.reward_models
        if model.problem is None and model.context is not None and model.context < longest
    ]


def judge_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is wrong with what the reward judge is told."""
    # A key in the address would stand in config.yaml whether or not anybody is asked.
    judge, problems = facts.judge, _address(config)
    if judge is None:
        return problems
    problems += [*_lacking(config), *_prompt(config, facts)]
    if judge.regex_problem is not None:
        usual = Fix(text=tr("the usual one"), edits={"judge_regex": default_of("judge_regex")})
        seen = tr(
            "judge_regex is {judge_regex!r}: {regex_problem}.",
            judge_regex=config.judge_regex,
            regex_problem=judge.regex_problem,
        )
        problems.append(
            problem("E342", "judge_regex", seen, tr("A bracket that is lost or not escaped."), usual)
        )
    return problems


def _option(config: Config, model: RewardModelFacts) -> str:
    return "reward_model" if model.entry in config.reward_model else "reward_funcs"


def _unusable(config: Config, model: RewardModelFacts) -> Problem:
    cause, advice = _FAULTS.get(model.fault, _OTHERS)
    fix = Fix(text=advice.replace("DIR", model.directory or model.entry).replace("ENTRY", model.entry))
    return problem("E337", _option(config, model), tr("{problem}.", problem=model.problem), cause, fix)


def _revisions(config: Config, facts: Facts) -> list[Problem]:
    models, revisions = config.reward_model, config.reward_model_revision
    if not revisions:
        return []
    local = {m.entry for m in facts.reward_models if m.directory == os.path.expanduser(m.entry)}
    if len(models) != len(revisions):
        seen = tr(
            "reward_model_revision has {num_revisions} and reward_model {num_models}; each has its own.",
            num_revisions=len(revisions),
            num_models=len(models),
        )
        cause = tr(
            "A model was added or taken away, or one stands in --reward_funcs, which takes no revision."
        )
    elif ignored := [m for m, r in zip(models, revisions, strict=True) if m in local and r != _MAIN]:
        seen = tr(
            "{ignored} is a directory, which has no revisions but {main}.",
            ignored=", ".join(ignored),
            main=_MAIN,
        )
        cause = tr("A revision of a hub's model beside a copy on this machine.")
    else:
        return []
    without = Fix(text=tr("the main branches"), edits={"reward_model_revision": []})
    return [problem("E339", "reward_model_revision", seen, cause, without)]


def _without_template(config: Config, model: RewardModelFacts) -> Problem:
    return problem(
        "E338",
        _option(config, model),
        tr("{entry} has no chat template, and the prompts are messages.", entry=model.entry),
        tr("A model that was trained on plain text, or whose template was not saved beside its tokenizer."),
        Fix(text=tr("put its chat_template.jinja into {directory}", directory=model.directory)),
        Fix(text=tr("prompts that are text, in a column prompt: both models then read the same words")),
    )


def _lacking(config: Config) -> list[Problem]:
    lacking = [n for n in ("judge_base_url", "judge_model", "judge_prompt") if not getattr(config, n)]
    if not lacking:
        return []
    examples = {"judge_base_url": "http://127.0.0.1:8000/v1", "judge_model": "NAME", "judge_prompt": _ASKS}
    words = " ".join(f"--{n} '{examples[n]}'" for n in lacking)
    seen = tr("The reward judge is asked for, and not given: {lacking}.", lacking=", ".join(lacking))
    cause = tr("An option that was left out; none of them has a default.")
    return [problem("E340", lacking[0], seen, cause, Fix(text=tr("as in {words}", words=words)))]


def _address(config: Config) -> list[Problem]:
    url = config.judge_base_url
    fault = _url_fault(url) if url else None
    if fault is None:
        return []
    cause = tr("A part of the address was lost, or a key was put into it.")
    fix = Fix(text=tr("as in --judge_base_url http://127.0.0.1:8000/v1; a key is OPENAI_API_KEY"))
    return [problem("E340", "judge_base_url", tr("judge_base_url {fault}.", fault=fault), cause, fix)]


def _url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return tr("is no address: {error}", error=error)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # Its value is not repeated: a key may stand in it.
        return tr("holds more than http(s)://HOST:PORT/PATH; keys and passwords have no place in it")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        return tr("is {url!r}, which is no address of the form http(s)://HOST:PORT/PATH", url=url)
    return tr("has port 0") if port == 0 else None


def _prompt(config: Config, facts: Facts) -> list[Problem]:
    assert facts.judge is not None
    if facts.judge.prompt_problem is not None:
        cause = tr("The judge would be asked the same whatever the model writes, or a path is misspelt.")
        fix = Fix(text=tr("as in --judge_prompt '{asks}'", asks=_ASKS))
        return [
            problem(
                "E341",
                "judge_prompt",
                tr("{prompt_problem}.", prompt_problem=facts.judge.prompt_problem),
                cause,
                fix,
            )
        ]
    names = [*(facts.columns or ()), "prompt", "completion"]
    return [
        problem(
            "E341",
            "judge_prompt",
            tr(
                "judge_prompt has {{{name}}}, which is no column of the data; there are {names}.",
                name=name,
                names=", ".join(names),
            ),
            tr("A misspelt column, or one of another data set."),
            Fix(
                text=tr("the nearest is {{{near}}}", near=near)
                if (near := nearest(name, names))
                else tr("a column of the data")
            ),
            Fix(text=tr("{{{{{name}}}}} for the word in braces itself", name=name)),
        )
        for name in facts.judge.unknown
    ]
