"""What is wrong with rewards that are not there, cannot be called, or failed their trial."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from covey.config.names import nearest
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.texts import filled, replaced, tr
from covey.types import GOLD_NAMES, FaultKind, Fix, Problem, RewardCause, RewardFault

# By the kind of the fault; every other is one of loading.
_FAULTS: Mapping[FaultKind, tuple[str, str, str]] = {
    "unknown": (
        "E306",
        tr("A reward of another tool, a misspelt name, or a plugin that was left out."),
        tr("a function of yours is FILE.py:NAME or package.module.NAME; a plugin's needs --external_plugins"),
    ),
    "import": (
        "E314",
        tr("A misspelt name, a file from another directory, or an import that fails here."),
        tr("rewards are written as FILE.py:NAME or package.module.NAME"),
    ),
    "signature": (
        "E315",
        tr("The function was written for another data set, or a column has another name there."),
        tr("rename a column with --columns, or give the argument a default"),
    ),
    "trial": (
        "E316",
        tr("An error in the function, or a row that it was not written for."),
        tr("mend the function; --reward_trial false skips the trial, for judges that cost money"),
    ),
}

# What is likely the cause and what to do, where more is known than the kind; `file` is the user's.
_CAUSES: Mapping[RewardCause, tuple[str, str]] = {
    "bare_file": (tr("A file may hold several functions."), tr("write {file}:NAME, with a colon")),
    "no_file": (
        tr("A misspelt path, or one relative to another directory."),
        tr("`ls {directory}` shows what is there"),
    ),
    "no_module": (
        tr("A package of another environment, or a file of yours that is not beside this one."),
        tr("`python {file}` shows the same; `pip install` what it needs into the environment of covey"),
    ),
    "import": (tr("An error in the file."), tr("`python {file}` shows the same error with its place")),
    "num_steps": (
        tr("A list is one number per step: the pieces between --step_separator, but an empty last one."),
        tr(
            "go through completion_steps, an argument with the steps of each completion; one "
            "number for all of them is returned as it is, not as a list or array of one"
        ),
    ),
    "no_step_number": (
        tr("Each entry of a list is the number of a step."),
        tr("return [[score(step) for step in steps] for steps in completion_steps], each a number"),
    ),
    "num_values": (
        tr("The function is given lists, one entry per completion, and gives one number for each."),
        tr("return [score(c) for c in completions]; None for a completion that it has no word on"),
    ),
    "not_finite": (
        tr("A division by zero, a logarithm of zero, or a judge that gave no answer."),
        tr("mend the function, or return None where it has no word on a completion"),
    ),
    "no_number": (
        tr("The function is given lists, one entry per completion, and gives one number for each."),
        tr("return [score(c) for c in completions], each a number; None where it has no word"),
    ),
    "judge": (
        tr("The service is not there, knows no such model, or wants a key."),
        tr("`curl {judge}/models` shows whether it answers; the key is the environment's OPENAI_API_KEY"),
    ),
    "verdict": (
        tr("The judge was not told how to write its verdict, or was cut before it."),
        tr("have judge_prompt ask for what judge_regex finds, on a line at the end"),
    ),
}
_UNMADE_MODEL = (
    tr("Its files are not whole, or of another version of transformers."),
    tr("AutoModelForSequenceClassification.from_pretrained({file}) shows the same"),
)
_OF_THE_JUDGE = ("judge", "verdict")


def faulty_reward_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is wrong with each reward that cannot be used."""
    return [_faulty(config, facts, fault) for fault in _once_each(facts.faulty_rewards)]


def _once_each(faults: Sequence[RewardFault]) -> list[RewardFault]:
    """Return the faults, those that both answers to a row of the trial show as one."""
    kept: list[RewardFault] = []
    for fault in faults:
        last = kept[-1] if kept else None
        if last is None or fault.completion or not _is_of_one_row(last, fault):
            kept.append(fault)
        elif last.completion:
            both = tr(
                "on row {row}, whose completion is {text!r:.60}, and with an empty completion: {said}",
                row=fault.row,
                text=last.completion,
                said=fault.said,
            )
            kept[-1] = replace(last, words=both)
    return kept


def _is_of_one_row(one: RewardFault, other: RewardFault) -> bool:
    same = (other.reward, other.row, other.said)
    return one.kind == other.kind == "trial" and other.said != "" and (one.reward, one.row, one.said) == same


def _faulty(config: Config, facts: Facts, fault: RewardFault) -> Problem:
    fault = _as_typed(config, fault)
    name, words = fault.reward, fault.words
    code, cause, advice = _advised(config, fault)
    places = ("reward_funcs", "reward_model", "external_plugins")
    option = next((place for place in places if name in getattr(config, place)), "external_plugins")
    is_named = fault.subject == name or fault.cause in _OF_THE_JUDGE
    return problem(
        code,
        option,
        words if is_named else tr("{name}: {words}", name=name, words=words),
        cause,
        *_typed_fixes(config, facts, fault),
        Fix(text=advice),
    )


def _advised(config: Config, fault: RewardFault) -> tuple[str, str, str]:
    """Return the code of a fault, its likely cause and what to do."""
    code, cause, advice = _FAULTS.get(fault.kind, _FAULTS["import"])
    if fault.kind == "trial" and fault.cause == "unmade":
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


def _typed_fixes(config: Config, facts: Facts, fault: RewardFault) -> list[Fix]:
    """Return the fixes that are option values: the nearest name, or a renamed column."""
    near = None
    if fault.kind == "unknown":
        near = nearest(fault.reward, facts.rewards_available or ())
    elif fault.near and ".py:" in fault.reward:
        near = f"{fault.reward.rpartition(':')[0]}:{fault.near}"
    if near is not None:
        names = list(dict.fromkeys(near if n == fault.reward else n for n in config.reward_funcs))
        return [Fix(text=tr("the nearest is {near}", near=near), edits={"reward_funcs": names})]
    there = set(facts.columns or ()) - set(facts.made_columns)
    gold = next((name for name in GOLD_NAMES if name in there), None)
    if gold is None or len(fault.lacking) != 1 or len(config.reward_funcs) > 1:
        return []
    (lacking,) = fault.lacking
    if lacking not in GOLD_NAMES:
        return []
    columns = {old: new for old, new in (config.columns or {}).items() if new != gold}
    source = next((old for old, new in (config.columns or {}).items() if new == gold), gold)
    text = tr("call the column {gold} {lacking}, as the function does", gold=gold, lacking=lacking)
    return [Fix(text=text, edits={"columns": {**columns, source: lacking}})]
