"""Finds faults in the rewards: their names, weights, lengths and forms, and the gold answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.checks.check import Check
from covey.checks.rewards.apart import context_warnings, judge_problems, reward_model_problems
from covey.checks.rewards.codes import CODES
from covey.checks.rewards.faults import faulty_reward_problems
from covey.checks.rewards.steps import step_problems
from covey.options.schema import Config
from covey.plan.facts import DataFacts, OpenLists, PromptFacts, RewardFacts
from covey.plan.problem import problem, warning
from covey.texts import counted, joined, plural, tr
from covey.types import GOLD_COLUMNS, GOLD_NAMES, BlindReward, Fix, Problem

_ASKS_FOR_FORMAT = ("format", "tag_count", "think_format_reward", "trl.rewards.think_format_reward")
_COSINE = (
    *("cosine_min_len_value_correct", "cosine_max_len_value_correct"),
    *("cosine_min_len_value_wrong", "cosine_max_len_value_wrong"),
)


def reward_problems(
    config: Config, data: DataFacts, prompts: PromptFacts, rewards: RewardFacts
) -> list[Problem]:
    """Return what the facts say against the rewards."""
    return [
        *reward_model_problems(config, prompts, rewards),
        *context_warnings(config, prompts, rewards),
        *judge_problems(config, data, rewards),
        *faulty_reward_problems(config, data, rewards),
        *_twice(config),
        *_weights(config),
        *_golds(config, data, rewards),
        *_open_lists(config, rewards),
        *(_blind(b) for b in rewards.blind if config.reward_trial),
        *_unasked_format(config, prompts),
        *_overlong(config, rewards),
        *_cosine(config, rewards),
    ]


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
            plural(
                len(again),
                "{names} is named more than once.",
                "{names} are named more than once.",
                names=joined(", ", again),
            ),
            tr("To count a reward more, give it a larger weight."),
            Fix(text=tr("name each reward once, with the same total weight"), edits=edits),
        )
    ]


def _weights(config: Config) -> list[Problem]:
    funcs, weights = config.rewards, config.reward_weights
    if len(set(funcs)) < len(funcs) or not funcs:
        return []
    ones = Fix(text=tr("every reward counts the same"), edits={"reward_weights": [1.0] * len(funcs)})
    if len(weights) != len(funcs):
        seen = tr(
            "{weights} for {rewards}: {values} for {funcs}.",
            weights=counted(len(weights), "weight"),
            rewards=counted(len(funcs), "reward"),
            values=joined(", ", [f"{w:g}" for w in weights]) or "none",
            funcs=joined(", ", funcs),
        )
        return [problem("E307", "reward_weights", seen, "", ones)]
    if not any(weights):
        seen = tr("Every weight is 0: {funcs}.", funcs=joined(", ", funcs))
        cause = tr("A weight of 0 only records a reward; at least one weight must not be 0.")
        return [problem("E308", "reward_weights", seen, cause, ones)]
    return []


def _golds(config: Config, data: DataFacts, rewards: RewardFacts) -> list[Problem]:
    golds = rewards.golds
    if golds is None or not golds.num_bad:
        return []
    share = golds.num_bad / golds.num_checked
    too_many = share > config.max_bad_gold
    shown = joined(
        "; ",
        [
            tr("row {row}: {text!r} ({why})", row=row, text=text[:60], why=why)
            if text
            else tr("row {row}: {why}", row=row, why=why)
            for row, text, why in golds.examples
        ],
    )
    fixes = [_better_column(golds.rename)]
    if too_many and share < 1:
        # Rounded up, so that the option typed is enough.
        enough = min(1.0, int(share * 100 + 1) / 100)
        fixes.append(Fix(text=tr("train only on the other rows"), edits={"max_bad_gold": enough}))
    say = problem if too_many else warning
    return [
        say(
            "E310" if too_many else "W111",
            "max_bad_gold",
            tr(
                "{num_bad:,} of {num_checked:,} gold answers cannot be read ({share:.1%}). {shown}.",
                num_bad=golds.num_bad,
                num_checked=golds.num_checked,
                share=share,
                shown=shown,
            ),
            tr("Another column holds the answers, or the solutions end without an answer.")
            if any(text for _, text, _ in golds.examples) or not golds.examples
            else _no_answers(data),
            *fixes,
        )
    ]


def _better_column(rename: Mapping[str, str] | None) -> Fix:
    """Return where the answers are, or what to do where no column has them."""
    if rename is None:
        return Fix(
            text=tr(
                'correct these rows, or name the column with the answers: --columns \'{"NAME": "solution"}\''
            )
        )
    column = next(old for old, new in rename.items() if new == GOLD_COLUMNS[0])
    return Fix(
        text=tr("take the answers from the column {column}", column=column), edits={"columns": dict(rename)}
    )


def _open_lists(config: Config, rewards: RewardFacts) -> list[Problem]:
    """E366 and W129: lists that may be alternatives or parts of one answer, while `gold_lists` is not set."""
    if rewards.golds is None or config.gold_lists is not None:
        return []
    return [_lists(found) for found in rewards.golds.open_lists]


def _lists(found: OpenLists) -> Problem:
    seen = tr(
        "{num_open:,} of {num_lists:,} lists in the column {column}{where} hold only different "
        "letters, numbers or formulas, such as {example:.60} in row {row}.",
        num_open=found.num_open,
        num_lists=found.num_lists,
        column=found.column,
        where=_where(found),
        example=found.example,
        row=found.row,
    )
    any_fix = Fix(text=tr("one member is enough"), edits={"gold_lists": "any"})
    rows_fix = Fix(
        text=tr(
            "if some lists are alternatives and others are parts: type --gold_lists any, and write parts "
            'as a list within the list, [["A", "C"]]'
        )
    )
    if found.is_decided:
        cause = tr("The other lists are alternatives, so for every list one member is enough.")
        return warning("W129", "gold_lists", seen, cause, any_fix, rows_fix)
    cause = tr(
        "They may be alternatives, and then one is enough, or the parts of one answer, and then all are "
        "needed."
    )
    all_fix = Fix(text=tr("all members are needed, in any order"), edits={"gold_lists": "all"})
    return problem("E366", "gold_lists", seen, cause, any_fix, all_fix, rows_fix)


def _where(found: OpenLists) -> str:
    """Return the evaluation set and the task in which lists were found, in words."""
    words = [tr(" (evaluation set {where})", where=found.where)] if found.where else []
    words += [tr(" (task {task})", task=found.task)] if found.task else []
    return joined("", words)


def _no_answers(data: DataFacts) -> str:
    """Return why rows have no gold answer: its column holds what no reward gets, or it is another one."""
    of_bytes = [name for name in GOLD_NAMES if name in data.unread_columns]
    if of_bytes:
        return tr("The answers in the column {column} are bytes, not text.", column=of_bytes[0])
    return tr("The rows have no answer, or another column holds it.")


def _blind(reward: BlindReward) -> Problem:
    if not reward.reward:
        return _blind_total(reward)
    if reward.form:
        return _blind_form(reward)
    seen = tr(
        "On {missed} of {rows} rows {name} scores the correct answer (column {column}) no higher "
        "than {than}; each answer was tried in several forms.",
        name=reward.reward,
        column=reward.column,
        than=_compared(reward),
        missed=reward.num_rows - reward.num_told_apart,
        rows=reward.num_rows,
    )
    if reward.constant is not None:
        seen += tr(" It gives every completion the same score, {constant:g}.", constant=reward.constant)
    return warning(
        "W116",
        "reward_funcs",
        seen,
        tr(
            "It may compare with another column, catch an exception and return a number, have the "
            "wrong sign, or expect another form of answer than those tried."
        ),
        Fix(text=tr("call the function on a right completion and on a wrong one")),
        _NO_TRIAL,
    )


_NO_TRIAL = Fix(text=tr("skip the trial, for rewards that it cannot judge"), edits={"reward_trial": False})


def _compared(reward: BlindReward) -> str:
    return tr("an empty completion") if reward.compared == "empty" else tr("the gold answers of other rows")


def _blind_total(reward: BlindReward) -> Problem:
    return warning(
        "W116",
        "reward_weights",
        tr(
            "On {missed} of {rows} rows the weighted total scores the correct answer (column "
            "{column}) no higher than {than}; each answer was tried in several forms.",
            column=reward.column,
            than=_compared(reward),
            missed=reward.num_rows - reward.num_told_apart,
            rows=reward.num_rows,
        ),
        tr("Another reward pays more for an empty answer than the right answer earns."),
        Fix(text=tr("give a larger weight to the reward that reads the gold answers")),
        _NO_TRIAL,
    )


def _blind_form(reward: BlindReward) -> Problem:
    return warning(
        "W116",
        "reward_funcs",
        tr(
            "{name} does not recognize answers written as {form} (GOLD is the answer in {column}): "
            "on {missed} of {rows} rows it scores them no higher than an empty completion.",
            name=reward.reward,
            form=reward.form,
            column=reward.column,
            missed=reward.num_rows - reward.num_told_apart,
            rows=reward.num_rows,
        ),
        "",
        Fix(
            text=tr(
                "ask for another form in the prompts, or shorten the answers in {column}",
                column=reward.column,
            )
        ),
        _NO_TRIAL,
    )


def _unasked_format(config: Config, prompts: PromptFacts) -> list[Problem]:
    asking = [name for name in config.reward_funcs if name in _ASKS_FOR_FORMAT]
    # The built-in model was taught the tags of its task.
    is_taught = config.model == "quickstart" and config.dataset == ["quickstart"]
    if prompts.mention_format is not False or not asking or is_taught:
        return []
    rewards = joined(tr(" and "), asking)
    fixes = [Fix(text=tr("ask for it in the prompts"))]
    if config.system is None:
        fixes.insert(0, Fix(text=tr("use a system message that asks for both tags"), edits={"system": "r1"}))
    return [
        warning(
            "W110",
            "reward_funcs",
            plural(
                len(asking),
                "The reward {rewards} is used, but neither the prompts nor the template mention <think> or "
                "<answer>.",
                "The rewards {rewards} are used, but neither the prompts nor the template mention <think> or "
                "<answer>.",
                rewards=rewards,
            ),
            tr(
                "In ms-swift's examples the system message asks for the tags; this command has no "
                "system message."
            )
            if config.system is None
            else "",
            *fixes,
        )
    ]


def _reads(config: Config, rewards: RewardFacts, option: str) -> bool:
    """Whether a built-in reward of the run reads the option."""
    names = (name.removeprefix("trl.rewards.") for name in config.reward_funcs)
    return any(option in rewards.options.get(name, ()) for name in names)


def _overlong(config: Config, rewards: RewardFacts) -> list[Problem]:
    """A penalty for length that every completion gets, or none."""
    longest, zone, limit = config.soft_max_length, config.soft_cache_length, config.max_completion_length
    if not _reads(config, rewards, "soft_max_length") or min(longest, limit) < 1 or zone < 0:
        return []
    if zone > longest:
        edits: dict[str, Any] = {"soft_cache_length": max(1, longest // 5)}
        return [
            problem(
                "E324",
                "soft_cache_length",
                tr(
                    "soft_cache_length is {zone} and soft_max_length is {longest}: the penalty "
                    "would begin {before} tokens before the completion does.",
                    zone=zone,
                    longest=longest,
                    before=zone - longest,
                ),
                tr("The two lengths may be swapped."),
                Fix(text=tr("use one fifth of soft_max_length, as in DAPO"), edits=edits),
            )
        ]
    if longest - zone < limit:
        return []
    edits = {"soft_max_length": limit, "soft_cache_length": max(1, limit // 5)}
    return [
        problem(
            "E325",
            "soft_max_length",
            tr(
                "soft_max_length is {longest} and soft_cache_length is {zone}, so the penalty "
                "begins after token {start}, but a completion has at most {limit} tokens.",
                longest=longest,
                zone=zone,
                start=longest - zone,
                limit=limit,
            ),
            tr(
                "The lengths were chosen for a larger max_completion_length, such as 1280 and 256 of "
                "TRL's command line."
            ),
            Fix(text=tr("use the last fifth of a completion, as in DAPO"), edits=edits),
        )
    ]


def _cosine(config: Config, rewards: RewardFacts) -> list[Problem]:
    values = {name: getattr(config, name) for name in _COSINE}
    right, wrong = list(values.values())[:2], list(values.values())[2:]
    if not _reads(config, rewards, "cosine_max_len") or min(right) > max(wrong):
        return []
    return [
        warning(
            "W120",
            next(name for name, value in values.items() if value == max(wrong) and name.endswith("wrong")),
            tr(
                "cosine gives right answers {right_low:g} to {right_high:g} and wrong ones "
                "{wrong_low:g} to {wrong_high:g}.",
                right_low=min(right),
                right_high=max(right),
                wrong_low=min(wrong),
                wrong_high=max(wrong),
            ),
            tr("A sign may be missing, or the values for right and wrong are swapped."),
            Fix(text=tr("use the defaults"), edits=dict(zip(_COSINE, (1.0, 0.5, -0.5, 0.0), strict=True))),
        )
    ]


CHECK = Check(
    place=130,
    judge=lambda config, facts, _: reward_problems(config, facts.data, facts.prompts, facts.rewards),
    codes=CODES,
)
STEPS = Check(place=140, judge=lambda config, facts, typed: step_problems(config, facts.rewards, typed or ()))
