"""Finds faults in tools and environments, and in the template that tells the model of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from covey.checks.check import Check
from covey.checks.tools.codes import CODES
from covey.config.derive import is_usual
from covey.options.schema import Config
from covey.options.turns import TurnOptions
from covey.plan.facts import Facts, Rehearsal
from covey.plan.problem import problem, warning
from covey.texts import joined, tr
from covey.types import Fix, Problem

_CODE_OF = {"missing": "E390", "import": "E390", "environment": "E393"}
_SHOWN = 200
_REWARD = "environment"


def tool_problems(config: Config, facts: Facts, typed: Collection[str] | None) -> list[Problem]:
    """Return what stands against tools and environment."""
    if not config.has_turns:
        return [*_idle(config, typed or ()), *_reward(config, facts)]
    return [
        *_beside(config),
        *_faults(config, facts),
        *_format(config, facts),
        *_prompts(config, facts),
        *_limits(config),
        *_reward(config, facts),
        *_rehearsed(config, facts),
    ]


def _idle(config: Config, typed: Collection[str]) -> list[Problem]:
    """Return a warning for options of turns where every episode has one."""
    values = config.model_dump()
    of_function = ("rollout_func", "environment_starts") if config.rollout_func is not None else ()
    own = [n for n in TurnOptions.model_fields if n not in of_function]
    names = [n for n in own if n in typed and not is_usual(n, values)]
    if not names:
        return []
    if of_function:
        seen = tr(
            "{names} is set, but rollout_func itself makes the turns of an episode.",
            names=joined(", ", names),
        )
        return [warning("W108", names[0], seen, "", Fix(text=tr("leave it out")))]
    seen = tr(
        "{names} is set, but there are no tools and no environment, so every completion is one turn.",
        names=joined(", ", names),
    )
    tools = Fix(text=tr("name the tools: --tools FILE.py:NAME"))
    return [warning("W108", names[0], seen, "", tools, Fix(text=tr("leave it out")))]


def _beside(config: Config) -> Iterator[Problem]:
    """Give a problem for each option that cannot stand beside a scheduler."""
    cause = tr("The scheduler already decides what follows each turn.")
    alone = Fix(text=tr("leave out the scheduler"), edits={"multi_turn_scheduler": None})
    others: dict[str, tuple[bool, Any]] = {
        "tools": (bool(config.tools), []),
        "environment_factory": (config.environment_factory is not None, None),
        "rollout_func": (config.rollout_func is not None, None),
    }
    for name, (is_set, absent) in others.items():
        if config.multi_turn_scheduler is not None and is_set:
            seen = tr("multi_turn_scheduler and {name} are both set.", name=name)
            leave = Fix(text=tr("leave out {name}", name=name), edits={name: absent})
            yield problem("E398", name, seen, cause, leave, alone)


def _faults(config: Config, facts: Facts) -> list[Problem]:
    found = []
    for fault in facts.tools.faults:
        option = _option_of(fault.entry, config)
        code = _CODE_OF.get(fault.kind, "E391")
        found.append(
            problem(
                code,
                option,
                tr("{entry}: {words}.", entry=fault.entry, words=fault.words),
                "",
                *_fixes(fault.kind, option),
            )
        )
    return found


def _option_of(entry: str, config: Config) -> str:
    if config.multi_turn_scheduler is not None:
        return "multi_turn_scheduler"
    return "environment_factory" if entry == config.environment_factory else "tools"


def _fixes(kind: str, option: str) -> tuple[Fix, ...]:
    if kind == "no_hints":
        return (Fix(text=tr("give every argument a type: def add(a: int, b: int) -> int")),)
    if kind == "no_docstring":
        form = "Args:\\n    a: The first number."
        return (Fix(text=tr("write a docstring that describes every argument: {form}", form=form)),)
    if kind == "import":
        return (Fix(text=tr("mend its file; Python says the same of it when it imports the file")),)
    if kind == "missing" and option == "multi_turn_scheduler":
        return (Fix(text=tr("name the file that registers it: --external_plugins FILE.py")),)
    if kind == "missing":
        return (Fix(text=tr("name it as --{option} FILE.py:NAME or package.module:NAME", option=option)),)
    return (Fix(text=tr("docs/tools.md shows what functions and classes look like")),)


def _option(config: Config) -> str:
    """Return the option that makes episodes of several turns."""
    names = ("tools", "environment_factory", "multi_turn_scheduler")
    return next(name for name in names if getattr(config, name))


def _format(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against the chat template."""
    tools = facts.tools
    said = {
        "no_tools": tr("The chat template does not tell the model of its tools."),
        "no_calls": tr("The chat template has no place for calls of tools or for their results."),
        "unknown_format": tr(
            "The chat template writes calls of tools in a format that covey does not read: {written!r}.",
            written=tools.written[:_SHOWN],
        ),
    }
    if not tools.no_format:
        return []
    chatml = Fix(
        text=tr("use covey's template with tools for ChatML models"), edits={"chat_template": "chatml-tools"}
    )
    own = Fix(text=tr("give a template that writes tools: --chat_template FILE"))
    fixes = (chatml, own) if tools.may_be_chatml else (own,)
    return [problem("E392", _option(config), said[tools.no_format], "", *fixes)]


def _prompts(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against the prompts."""
    if facts.prompts.are_text:
        seen = tr("Some prompts are text that no chat template has touched.")
        fix = Fix(text=tr("send them through the chat template"), edits={"apply_chat_template": True})
        return [problem("E394", _option(config), seen, "", fix)]
    if config.truncation_strategy == "left":
        seen = tr("truncation_strategy left cuts the beginning of a prompt, where the tools stand.")
        fix = Fix(text=tr("leave out long prompts"), edits={"truncation_strategy": "delete"})
        return [problem("E394", "truncation_strategy", seen, "", fix)]
    return []


def _limits(config: Config) -> list[Problem]:
    if not config.is_limited_by_turn or config.max_turns is not None:
        return []
    seen = tr("completion_length_limit_scope is per_round, but max_turns is not set.")
    return [
        problem(
            "E395",
            "max_turns",
            seen,
            "",
            Fix(text=tr("limit the turns"), edits={"max_turns": 8}),
            Fix(text=tr("limit all turns together"), edits={"completion_length_limit_scope": "total"}),
        )
    ]


def _reward(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against the reward `environment`, and a warning where it is not counted."""
    gives, is_counted = facts.tools.gives_reward, _REWARD in config.reward_funcs
    without = [name for name in config.reward_funcs if name != _REWARD]
    leave = Fix(text=tr("leave out the reward {reward}", reward=_REWARD), edits={"reward_funcs": without})
    if is_counted and config.environment_factory is None and config.multi_turn_scheduler is None:
        seen = tr("The reward {reward} is counted, but there is no environment.", reward=_REWARD)
        name = Fix(text=tr("name the environment: --environment_factory FILE.py:CLASS"))
        return [problem("E396", "reward_funcs", seen, "", name, *([leave] if without else []))]
    if config.multi_turn_scheduler is not None:
        return []
    if is_counted and gives is False:
        seen = tr("The reward {reward} is counted, but the environment has no get_reward().", reward=_REWARD)
        give = Fix(text=tr("give the class a method get_reward(self) -> float"))
        return [problem("E396", "reward_funcs", seen, "", give, *([leave] if without else []))]
    if gives and not is_counted:
        seen = tr("The environment gives rewards, but reward_funcs does not count them.")
        count = Fix(text=tr("count them"), edits={"reward_funcs": [*config.reward_funcs, _REWARD]})
        return [warning("W154", "reward_funcs", seen, "", count)]
    return []


def _rehearsed(config: Config, facts: Facts) -> list[Problem]:
    """Return what scripted policies have shown."""
    played = facts.tools.rehearsal
    if played is None:
        return []
    if played.lost:
        if config.multi_turn_scheduler is None:
            seen = tr(
                "An episode was tried before the run, and the environment failed: {lost}.", lost=played.lost
            )
        else:
            seen = tr(
                "An episode was tried before the run, and the scheduler failed: {lost}.", lost=played.lost
            )
        fix = Fix(text=tr("mend it; `covey rehearse` with the same options tries it again"))
        return [problem("E393", _option(config), seen, "", fix)]
    found = []
    if played.starts_alike is False and config.environment_starts == "alike":
        seen = tr("The environment began the episodes of one group differently.")
        cause = tr("reset() draws random numbers that are not seeded; it can be passed the argument seed.")
        use = Fix(text=tr("draw them from random.Random(seed), with seed as an argument of reset()"))
        if config.multi_turn_scheduler is not None:
            cause = tr("random, numpy and torch are seeded before each trajectory; other generators are not.")
            use = Fix(text=tr("draw from random before the first request, or from a seed in a column"))
        meant = Fix(text=tr("if this is meant, allow it"), edits={"environment_starts": "differ"})
        found.append(problem("E397", "environment_starts", seen, cause, use, meant))
    return [*found, *_ranking(played)]


def _ranking(played: Rehearsal) -> list[Problem]:
    """Return warnings about rewards that put a scripted policy above what is right, or silence above
    trying."""
    found, option = [], "reward_funcs"
    if played.policies and all(policy.reward is None for policy in played.policies):
        seen = tr("None of {num} scripted policies was given a reward.", num=len(played.policies))
        give = Fix(text=tr("have step() return (messages, done, reward), or get_reward() a number"))
        return [warning("W157", option, seen, "", give)]
    gold, silent = played.reward_of("gold"), played.reward_of("silent")
    others = {p.name: p.reward for p in played.policies if p.name != "gold" and p.reward is not None}
    best = max(others, key=lambda name: others[name], default="")
    if gold is not None and best and others[best] >= gold:
        seen = tr(
            "The scripted policy {best!r} gets the reward {reward:g}; the right answer gets {gold:g}.",
            best=best,
            reward=others[best],
            gold=gold,
        )
        look = Fix(text=tr("look at the rewards of each policy: `covey rehearse` with the same options"))
        found.append(warning("W155", option, seen, "", look))
    tries = [others[name] for name in ("wrong arguments", "crashing tool", "endless") if name in others]
    if silent is not None and tries and silent > max(tries):
        seen = tr(
            "Saying nothing gets the reward {silent:g}; trying and failing gets {tried:g}.",
            silent=silent,
            tried=max(tries),
        )
        equal = Fix(text=tr("give an episode without an attempt no more than a failed one"))
        found.append(warning("W156", option, seen, "", equal))
    return found


CHECK = Check(judge=tool_problems, place=560, codes=CODES)
