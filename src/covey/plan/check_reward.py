"""What is wrong with the rewards: their names, weights, functions, trial, and the gold answers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.config.names import nearest
from covey.options.schema import Config
from covey.plan.check_apart import context_warnings, judge_problems, reward_model_problems
from covey.plan.facts import BlindReward, Facts, FaultyReward, GoldFacts, RewardFault
from covey.plan.problem import problem, warning
from covey.plan.shape import counted
from covey.types import Fix, Problem

_ASKS_FOR_FORMAT = ("format", "tag_count", "think_format_reward", "trl.rewards.think_format_reward")
_COSINE = (
    *("cosine_min_len_value_correct", "cosine_max_len_value_correct"),
    *("cosine_min_len_value_wrong", "cosine_max_len_value_wrong"),
)

_FAULTS: Mapping[RewardFault, tuple[str, str, str]] = {
    "unknown": (
        "E306",
        "A reward of another tool, a misspelt name, or a plugin that was left out.",
        "a function of yours is FILE.py:NAME or package.module.NAME; a plugin's needs --external_plugins",
    ),
    "load": (
        "E314",
        "A misspelt name, a file from another directory, or an import that fails here.",
        "rewards are written as FILE.py:NAME or package.module.NAME",
    ),
    "signature": (
        "E315",
        "The function was written for another data set, or a column has another name there.",
        "rename a column with --columns, or give the argument a default",
    ),
    "trial": (
        "E316",
        "An error in the function, or a row that it was not written for.",
        "mend the function; --reward_trial false skips the trial, for judges that cost money",
    ),
}

# (words of the fault, likely cause, what to do), the first that fits; FILE stands for the user's file.
_SPECIAL: Mapping[RewardFault, tuple[tuple[str, str, str], ...]] = {
    "unknown": ((" is a file;", "A file may hold several functions.", "write FILE:NAME, with a colon"),),
    "load": (
        (
            "there is no file",
            "A misspelt path, or one relative to another directory.",
            "`ls DIRECTORY` shows what is there",
        ),
        (
            "ModuleNotFoundError",
            "A package of another environment, or a file of yours that is not beside this one.",
            "`python FILE` shows the same; `pip install` what it needs into the environment of covey",
        ),
        ("cannot be imported", "An error in the file.", "`python FILE` shows the same error with its place"),
    ),
    "trial": (
        (
            " of a completion (",
            "A list is one number per step: the pieces between --step_separator, but an empty last one.",
            "go through completion_steps, an argument with the steps of each completion; one number for all "
            "of them is returned as it is, not as a list or array of one",
        ),
        (
            ", where a number is due",
            "Each entry of a list is the number of a step.",
            "return [[score(step) for step in steps] for steps in completion_steps], each a number",
        ),
        (
            "RewardModel",
            "Its files are not whole, or of another version of transformers.",
            "AutoModelForSequenceClassification.from_pretrained(FILE) shows the same",
        ),
        (
            "value",
            "The function is given lists, one entry per completion, and gives one number for each.",
            "return [score(c) for c in completions]; None for a completion that it has no word on",
        ),
        (
            "gave nan",
            "A division by zero, a logarithm of zero, or a judge that gave no answer.",
            "mend the function, or return None where it has no word on a completion",
        ),
        (
            "is due",
            "The function is given lists, one entry per completion, and gives one number for each.",
            "return [score(c) for c in completions], each a number; None where it has no word",
        ),
    ),
}
_OF_A_JUDGE = (
    (
        "the judge",
        "The service is not there, knows no such model, or wants a key.",
        "`curl JUDGE/models` shows whether it answers; the key is the environment's OPENAI_API_KEY",
    ),
    (
        "judge_regex",
        "The judge was not told how to write its verdict, or was cut before it.",
        "have judge_prompt ask for what judge_regex finds, on a line at the end",
    ),
)
_NOT_THERE = re.compile(r"demands (\w+), which is no column")
_NEAREST_NAME = re.compile(r"has no \S+; the nearest name is (\w+)")
_GOLD_NAMES = ("ground_truth", "gold", "label", "target", "reference", "answer", "solution")


def reward_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against the rewards."""
    return [
        *reward_model_problems(config, facts),
        *context_warnings(config, facts),
        *judge_problems(config, facts),
        *(_faulty(config, facts, fault) for fault in _once_each(facts.faulty_rewards)),
        *_twice(config),
        *_weights(config),
        *_golds(config, facts.golds),
        *(_blind(b) for b in facts.blind_rewards if config.reward_trial),
        *_unasked_format(config, facts),
        *_overlong(config, facts),
        *_cosine(config, facts),
    ]


def _once_each(faults: Sequence[FaultyReward]) -> list[FaultyReward]:
    """Return the faults, those that both rows of the trial show as one."""
    kept: list[FaultyReward] = []
    for fault in faults:
        said = fault.words.partition(_EMPTY)[2]
        last = kept[-1] if kept else None
        if said and last and last.kind == "trial" and last.name == fault.name and last.words.endswith(said):
            both = f"{last.words.removesuffix(said).removesuffix(': ')}, and{_EMPTY}{said}"
            kept[-1] = replace(last, words=both)
        else:
            kept.append(fault)
    return kept


_EMPTY = " with an empty completion: "


def _faulty(config: Config, facts: Facts, fault: FaultyReward) -> Problem:
    code, cause, advice = _FAULTS[fault.kind]
    name, words = _as_typed(config, fault)
    file = name.partition(".py:")[0] + ".py" if ".py:" in name else name
    of_a_judge = _OF_A_JUDGE if name == "judge" and fault.kind == "trial" else ()
    for needle, special, instead in (*of_a_judge, *_SPECIAL.get(fault.kind, ())):
        if needle in words:
            directory = shlex.quote(os.path.dirname(file) or ".")
            cause, advice = special, instead.replace("DIRECTORY", directory).replace("FILE", file)
            advice = advice.replace("JUDGE", config.judge_base_url or "")
            break
    fixes = [Fix(text=advice)]
    fixes[:0] = _typed_fixes(config, facts, fault)
    places = ("reward_funcs", "reward_model", "external_plugins")
    option = next((place for place in places if name in getattr(config, place)), "external_plugins")
    if fault.kind == "unknown":
        words = words.partition("; a function of yours")[0]
    is_named = name in words and not words.startswith("there is no file")
    return problem(code, option, words if is_named else f"{name}: {words}", cause, *fixes)


def _as_typed(config: Config, fault: FaultyReward) -> tuple[str, str]:
    """Return name and words of a fault with paths as the user wrote them."""
    files = [entry.partition(".py:")[0] + ".py" for entry in config.reward_funcs if ".py:" in entry]
    name, words = fault.name, fault.words
    for file in (*files, *config.external_plugins):
        whole = os.path.abspath(os.path.expanduser(file))
        name, words = (file if name == whole else name), words.replace(whole, file)
    return name, words


def _typed_fixes(config: Config, facts: Facts, fault: FaultyReward) -> list[Fix]:
    """Return the fixes that are option values: the nearest name, or a renamed column."""
    near = None
    if fault.kind == "unknown":
        near = nearest(fault.name, facts.rewards_available or ())
    elif fault.kind == "load" and (nearest_name := _NEAREST_NAME.search(fault.words)):
        near = f"{fault.name.rpartition(':')[0]}:{nearest_name[1]}" if ".py:" in fault.name else None
    if near is not None:
        names = list(dict.fromkeys(near if n == fault.name else n for n in config.reward_funcs))
        return [Fix(text=f"the nearest is {near}", edits={"reward_funcs": names})]
    lacking = _NOT_THERE.search(fault.words) if fault.kind == "signature" else None
    there = set(facts.columns or ()) - set(facts.made_columns)
    gold = next((name for name in _GOLD_NAMES if name in there), None)
    if lacking is None or gold is None or lacking[1] not in _GOLD_NAMES or len(config.reward_funcs) > 1:
        return []
    columns = {old: new for old, new in (config.columns or {}).items() if new != gold}
    source = next((old for old, new in (config.columns or {}).items() if new == gold), gold)
    text = f"call the column {gold} {lacking[1]}, as the function does"
    return [Fix(text=text, edits={"columns": {**columns, source: lacking[1]}})]


def _twice(config: Config) -> list[Problem]:
    names = list(dict.fromkeys(config.rewards))
    again = [name for name in names if config.rewards.count(name) > 1]
    if not again:
        return []
    funcs = list(dict.fromkeys(config.reward_funcs))
    edits: dict[str, Any] = {"reward_funcs": funcs} if funcs else {}
    if config.reward_model:
        edits["reward_model"] = names[len(funcs) :]
    if len(config.reward_weights) == len(config.rewards):
        pairs = list(zip(config.rewards, config.reward_weights, strict=True))
        edits["reward_weights"] = [sum(w for n, w in pairs if n == name) for name in names]
    else:
        edits["reward_weights"] = [1.0] * len(names)
    return [
        problem(
            "E307",
            "reward_funcs",
            f"{', '.join(again)} {'is' if len(again) == 1 else 'are'} named more than once.",
            "A typing error; how much a reward counts is said by its weight.",
            Fix(text="each reward once, with the same total", edits=edits),
        )
    ]


def _weights(config: Config) -> list[Problem]:
    funcs, weights = config.rewards, config.reward_weights
    if len(set(funcs)) < len(funcs) or not funcs:
        return []
    ones = Fix(text="every reward counts the same", edits={"reward_weights": [1.0] * len(funcs)})
    if len(weights) != len(funcs):
        seen = (
            f"{counted(len(weights), 'weight')} for {counted(len(funcs), 'reward')}: "
            f"{', '.join(f'{w:g}' for w in weights) or 'none'} for {', '.join(funcs)}."
        )
        cause = "A reward was added or taken away, and the weights were not."
        return [problem("E307", "reward_weights", seen, cause, ones)]
    if not any(weights):
        seen = f"Every weight is 0: {', '.join(funcs)}."
        cause = "Weights set to 0 to watch a reward without training on it; one has to count."
        return [problem("E308", "reward_weights", seen, cause, ones)]
    return []


def _golds(config: Config, golds: GoldFacts | None) -> list[Problem]:
    if golds is None or not golds.num_bad:
        return []
    share = golds.num_bad / golds.num_checked
    too_many = share > config.max_bad_gold
    shown = "; ".join(
        f"row {row}: {text[:60]!r} ({why})" if text else f"row {row}: {why}"
        for row, text, why in golds.examples
    )
    fixes = [
        Fix(text='mend these rows, or name the column with the answers: --columns \'{"NAME": "solution"}\'')
    ]
    if too_many and share < 1:
        # Rounded up, so that the option typed is enough.
        enough = min(1.0, int(share * 100 + 1) / 100)
        fixes.append(Fix(text="train on the other rows", edits={"max_bad_gold": enough}))
    say = problem if too_many else warning
    return [
        say(
            "E310" if too_many else "W111",
            "max_bad_gold",
            f"{golds.num_bad:,} of {golds.num_checked:,} gold answers cannot be read ({share:.1%}). {shown}.",
            "Another column holds the answers, or solutions that end without one."
            if any(text for _, text, _ in golds.examples) or not golds.examples
            else "Rows without an answer, or another column holds it.",
            *fixes,
        )
    ]


def _blind(reward: BlindReward) -> Problem:
    than = "an empty completion" if reward.compared == "empty" else "the gold answers of other rows"
    missed, rows = reward.num_rows - reward.num_told_apart, reward.num_rows
    skip = Fix(text="no trial, for rewards of which it says nothing", edits={"reward_trial": False})
    if not reward.name:
        return warning(
            "W116",
            "reward_weights",
            f"The weighted total gives the gold answers of {reward.column} no more than {than}, on {missed} "
            f"of {rows} rows, each tried in several forms.",
            "Another reward pays more for saying nothing than the right answer is worth.",
            Fix(text="a larger weight for the reward that reads the gold answers"),
            skip,
        )
    if reward.form:
        return warning(
            "W116",
            "reward_funcs",
            f"{reward.name} does not read {reward.form}, where GOLD is the answer in {reward.column}: on "
            f"{missed} of {rows} rows it scores no more than an empty completion.",
            "",
            Fix(text=f"ask for another form in the prompts, or shorten the answers in {reward.column}"),
            skip,
        )
    seen = (
        f"{reward.name} gives the gold answers of {reward.column} no more than {than}, on {missed} of {rows} "
        "rows, each tried in several forms."
    )
    if reward.constant is not None:
        seen += f" It gives {reward.constant:g} to everything."
    return warning(
        "W116",
        "reward_funcs",
        seen,
        "It compares with another column, catches an exception and returns a number, has the wrong sign, or "
        "reads answers in a form that was not tried.",
        Fix(text="call the function on a completion that is right, and on one that is wrong"),
        skip,
    )


def _unasked_format(config: Config, facts: Facts) -> list[Problem]:
    if facts.mentions_format is not False or not set(config.reward_funcs) & set(_ASKS_FOR_FORMAT):
        return []
    fixes = [Fix(text="say it in the prompts")]
    if config.system is None:
        fixes.insert(0, Fix(text="a system message that asks for both tags", edits={"system": "r1"}))
    return [
        warning(
            "W110",
            "reward_funcs",
            "The reward format is asked for, and neither prompts nor template speak of <think> or <answer>.",
            "In ms-swift's examples the system message says it, and it is not typed here.",
            *fixes,
        )
    ]


def _reads(config: Config, facts: Facts, option: str) -> bool:
    """Whether a built-in reward of the run reads the option."""
    names = (name.removeprefix("trl.rewards.") for name in config.reward_funcs)
    return any(option in facts.reward_options.get(name, ()) for name in names)


def _overlong(config: Config, facts: Facts) -> list[Problem]:
    """A penalty for length that every completion gets, or none."""
    longest, zone, limit = config.soft_max_length, config.soft_cache_length, config.max_completion_length
    if not _reads(config, facts, "soft_max_length") or min(longest, limit) < 1 or zone < 0:
        return []
    if zone > longest:
        edits: dict[str, Any] = {"soft_cache_length": max(1, longest // 5)}
        return [
            problem(
                "E324",
                "soft_cache_length",
                f"soft_cache_length is {zone} and soft_max_length is {longest}: the penalty would begin "
                f"{zone - longest} tokens before a completion does.",
                "The two lengths were swapped, or one of them is of another run.",
                Fix(text="a fifth of it, as in DAPO", edits=edits),
            )
        ]
    if longest - zone < limit:
        return []
    edits = {"soft_max_length": limit, "soft_cache_length": max(1, limit // 5)}
    return [
        problem(
            "E325",
            "soft_max_length",
            f"soft_max_length is {longest} and soft_cache_length is {zone}: the penalty begins behind token "
            f"{longest - zone}, and a completion has {limit} at most.",
            "Lengths for a larger max_completion_length, such as the 1280 and 256 of TRL's command line.",
            Fix(text="the last fifth of a completion, as in DAPO", edits=edits),
        )
    ]


def _cosine(config: Config, facts: Facts) -> list[Problem]:
    values = {name: getattr(config, name) for name in _COSINE}
    right, wrong = list(values.values())[:2], list(values.values())[2:]
    if not _reads(config, facts, "cosine_max_len") or min(right) > max(wrong):
        return []
    return [
        warning(
            "W120",
            next(name for name, value in values.items() if value == max(wrong) and name.endswith("wrong")),
            f"cosine gives right answers {min(right):g} to {max(right):g} and wrong ones {min(wrong):g} to "
            f"{max(wrong):g}.",
            "A sign that was lost, or values for right and wrong that were swapped.",
            Fix(text="the defaults", edits=dict(zip(_COSINE, (1.0, 0.5, -0.5, 0.0), strict=True))),
        )
    ]
