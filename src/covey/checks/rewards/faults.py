"""Finds faults in rewards that are not there, cannot be called, or failed their trial."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from covey.config.names import nearest
from covey.options.schema import Config
from covey.plan.facts import DataFacts, RewardFacts
from covey.plan.problem import problem
from covey.plan.task_rewards import shown
from covey.texts import filled, replaced, tr
from covey.types import GOLD_NAMES, FaultKind, Fix, Problem, RewardCause, RewardFault

# By the kind of the fault; every other is one of loading.
_FAULTS: Mapping[FaultKind, tuple[str, str, str]] = {
    "unknown": (
        "E306",
        tr("It is neither built in nor defined by a file in --external_plugins."),
        tr(
            "name your own function as FILE.py:NAME or package.module.NAME; a function from a plugin "
            "needs --external_plugins"
        ),
    ),
    "import": (
        "E314",
        "",
        tr("write rewards as FILE.py:NAME or package.module.NAME"),
    ),
    "signature": (
        "E315",
        tr("The function was written for another dataset, or a column has another name in it."),
        tr("rename a column with --columns, or give the argument a default"),
    ),
    "trial": (
        "E316",
        tr("The function has an error, or does not handle a row of this kind."),
        tr("correct the function; --reward_trial false skips the trial, for judges that cost money"),
    ),
}

# What is likely the cause and what to do, where more is known than the kind; `file` is the user's.
_CAUSES: Mapping[RewardCause, tuple[str, str]] = {
    "bare_file": (tr("A file may hold several functions."), tr("write {file}:NAME, with a colon")),
    "no_file": ("", tr("`ls {directory}` shows what is there")),
    "no_python": ("", tr("name a file that ends in .py: --external_plugins FILE.py")),
    "no_module": (
        tr("A package is not installed in this environment, or a file of yours is in another directory."),
        tr(
            "`python {file}` shows the same error; `pip install` the missing package into covey's environment"
        ),
    ),
    "import": (tr("The file has an error."), tr("`python {file}` shows the same error with its place")),
    "num_steps": (
        tr(
            "A list needs one number per step. Steps are the pieces between --step_separator; an empty "
            "last piece does not count."
        ),
        tr(
            "iterate over completion_steps, an argument with the steps of each completion; return "
            "one number for a whole completion as a plain number, not as a list or array with one "
            "entry"
        ),
    ),
    "no_step_number": (
        tr("Each entry of a list is the number of a step."),
        tr("return [[score(step) for step in steps] for steps in completion_steps], each a number"),
    ),
    "num_values": (
        tr("The function is given lists, one entry per completion, and gives one number for each."),
        tr(
            "return [score(c) for c in completions]; use None for a completion that the reward does "
            "not apply to"
        ),
    ),
    "not_finite": (
        tr("Possible causes: a division by zero, a logarithm of zero, or a judge that gave no answer."),
        tr("correct the function, or return None for a completion that the reward does not apply to"),
    ),
    "no_number": (
        tr("The function is given lists, one entry per completion, and gives one number for each."),
        tr(
            "return [score(c) for c in completions], each a number, or None for a completion that the "
            "reward does not apply to"
        ),
    ),
    "judge": (
        tr("The service is not running, does not have this model, or requires a key."),
        tr(
            "`curl {judge}/models` shows whether it answers; the key is read from the environment "
            "variable OPENAI_API_KEY"
        ),
    ),
    "verdict": (
        tr("The judge was not told how to write its verdict, or its answer was cut before it."),
        tr("let judge_prompt ask for a last line that judge_regex matches"),
    ),
}
_UNMADE_MODEL = (
    tr("Its files are incomplete, or were saved by another version of transformers."),
    tr("AutoModelForSequenceClassification.from_pretrained({file}) shows the same error"),
)
_FORMS: Mapping[str, str] = {
    "messages": tr("The function reads completions as lists of messages, but is given strings."),
    "text": tr("The function reads completions as strings, but is given lists of messages."),
}
_OF_THE_JUDGE = ("judge", "verdict")


def faulty_reward_problems(config: Config, data: DataFacts, rewards: RewardFacts) -> list[Problem]:
    """Return what is wrong with each reward that cannot be used."""
    return [_faulty(config, data, rewards, fault) for fault in _once_each(rewards.faulty)]


def _once_each(faults: Sequence[RewardFault]) -> list[RewardFault]:
    """Return the faults, those that both answers to a row of the trial show as one."""
    kept: list[RewardFault] = []
    for fault in faults:
        last = kept[-1] if kept else None
        if last is None or fault.completion or not _is_of_one_row(last, fault):
            kept.append(fault)
        elif last.completion:
            both = tr(
                "{said}; seen on row {row}, with the completion {text!r:.60} and with an empty one",
                row=fault.row,
                text=last.completion,
                said=fault.said,
            )
            kept[-1] = replace(last, words=both)
    return kept


def _is_of_one_row(one: RewardFault, other: RewardFault) -> bool:
    same = (other.reward, other.row, other.said)
    return one.kind == other.kind == "trial" and other.said != "" and (one.reward, one.row, one.said) == same


def _faulty(config: Config, data: DataFacts, rewards: RewardFacts, fault: RewardFault) -> Problem:
    fault = _as_typed(config, fault)
    name, words = fault.reward, fault.words
    code, cause, advice = _advised(config, fault)
    places = ("reward_funcs", "reward_model", "external_plugins")
    option = next((place for place in places if name in getattr(config, place)), "external_plugins")
    is_named = fault.subject == name or fault.cause in _OF_THE_JUDGE
    return problem(
        code,
        option,
        words if is_named else tr("{name}: {words}", name=_shown(config, name), words=words),
        cause,
        *_typed_fixes(config, data, rewards, fault),
        Fix(text=advice),
    )


def _shown(config: Config, reward: str) -> str:
    return dict(zip(config.rewards, shown(config.rewards), strict=True)).get(reward, reward)


def _advised(config: Config, fault: RewardFault) -> tuple[str, str, str]:
    """Return the code of a fault, its likely cause and what to do."""
    code, cause, advice = _FAULTS.get(fault.kind, _FAULTS["import"])
    if fault.form:
        cause = _FORMS[fault.form]
    elif fault.kind == "trial" and fault.cause == "unmade":
        cause, advice = _UNMADE_MODEL
    else:
        cause, advice = _CAUSES.get(fault.cause, (cause, advice))
    file = fault.reward.partition(".py:")[0] + ".py" if ".py:" in fault.reward else fault.reward
    directory = shlex.quote(os.path.dirname(file) or ".")
    return code, cause, filled(advice, file=file, directory=directory, judge=config.judge_base_url or "")


def _as_typed(config: Config, fault: RewardFault) -> RewardFault:
    """Return a fault with paths as the user wrote them."""
    files = [entry.partition(".py:")[0] + ".py" for entry in config.reward_funcs if ".py:" in entry]
    for file in (*files, *config.external_plugins):
        whole = os.path.abspath(os.path.expanduser(file))
        fault = replace(
            fault,
            reward=file if fault.reward == whole else fault.reward,
            subject=file if fault.subject == whole else fault.subject,
            words=replaced(fault.words, whole, file),
        )
    return fault


def _typed_fixes(config: Config, data: DataFacts, rewards: RewardFacts, fault: RewardFault) -> list[Fix]:
    """Return the fixes that are option values: the form of completions, the nearest name, or a renamed
    column."""
    if fault.form:
        text = tr("all rewards pass their trial with completions in this form")
        return [Fix(text=text, edits={"completion_form": fault.form})]
    near = None
    if fault.kind == "unknown":
        near = nearest(fault.reward, rewards.available or ()) or fault.near or None
    elif fault.near and ".py:" in fault.reward:
        near = f"{fault.reward.rpartition(':')[0]}:{fault.near}"
    if near is not None:
        names = list(dict.fromkeys(near if n == fault.reward else n for n in config.reward_funcs))
        return [Fix(text=tr("the nearest is {near}", near=near), edits={"reward_funcs": names})]
    there = set(data.columns or ()) - set(data.made_columns)
    gold = next((name for name in GOLD_NAMES if name in there), None)
    if gold is None or len(fault.lacking) != 1 or len(config.reward_funcs) > 1:
        return []
    (lacking,) = fault.lacking
    if lacking not in GOLD_NAMES:
        return []
    columns = {old: new for old, new in (config.columns or {}).items() if new != gold}
    source = next((old for old, new in (config.columns or {}).items() if new == gold), gold)
    text = tr(
        "rename the column {gold} to {lacking}, the name that the function uses", gold=gold, lacking=lacking
    )
    return [Fix(text=text, edits={"columns": {**columns, source: lacking}})]
