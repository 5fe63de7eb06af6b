"""What is wrong with the rewards: their names, weights, functions, trial, and the gold answers."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.names import nearest
from covey.config.schema import Config
from covey.plan.facts import Facts, FaultyReward, GoldFacts, RewardFault
from covey.plan.problem import problem, warning
from covey.plan.shape import counted
from covey.types import Fix, Problem

_ASKS_FOR_FORMAT = ("format", "think_format_reward", "trl.rewards.think_format_reward")

_FAULTS: Mapping[RewardFault, tuple[str, str, str]] = {
    "unknown": (
        "E306",
        "A reward of another tool, a misspelt name, or a plugin that was left out.",
        "a function of yours is FILE.py:NAME or package.module.NAME; a plugin's needs --external_plugins",
    ),
    "load": (
        "E314",
        "A misspelt name, a file from another directory, or an import that fails here.",
        "`python FILE.py` shows the same error; rewards are written as FILE.py:NAME or package.module.NAME",
    ),
    "signature": (
        "E315",
        "The function was written for another data set, or a column has another name there.",
        "rename a column with --columns, or give the argument a default or the function **kwargs",
    ),
    "trial": (
        "E316",
        "An error in the function, or a row that it was not written for.",
        "mend the function; --reward_trial false skips the trial, for judges that cost money",
    ),
}


def reward_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against the rewards."""
    return [
        *(_faulty(config, fault, facts.rewards_available or ()) for fault in facts.faulty_rewards),
        *_weights(config),
        *_golds(config, facts.golds),
        *_unasked_format(config, facts),
    ]


def _faulty(config: Config, fault: FaultyReward, available: tuple[str, ...]) -> Problem:
    code, cause, advice = _FAULTS[fault.kind]
    fixes = [Fix(text=advice)]
    near = nearest(fault.name, available) if fault.kind == "unknown" else None
    if near is not None:
        edits = {"reward_funcs": [near if n == fault.name else n for n in config.reward_funcs]}
        fixes.insert(0, Fix(text=f"the nearest is {near}", edits=edits))
    option = "reward_funcs" if fault.name in config.reward_funcs else "external_plugins"
    return problem(code, option, f"{fault.name}: {fault.words}", cause, *fixes)


def _weights(config: Config) -> list[Problem]:
    funcs, weights = config.reward_funcs, config.reward_weights
    if not funcs:
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
    shown = "; ".join(f"row {row}: {text[:60]!r} ({why})" for row, text, why in golds.examples)
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
            "Another column holds the answers, or solutions that end without one.",
            *fixes,
        )
    ]


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
