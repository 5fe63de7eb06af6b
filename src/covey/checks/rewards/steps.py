"""Finds options that exclude rewards of steps, and a separator of steps that nothing reads."""

from __future__ import annotations

from collections.abc import Collection

from covey.options.schema import Config, default_of
from covey.plan.facts import RewardFacts
from covey.plan.problem import problem, warning
from covey.plan.step_refusals import step_refusals
from covey.texts import joined, tr
from covey.types import Fix, Problem


def step_problems(config: Config, rewards: RewardFacts, typed: Collection[str]) -> list[Problem]:
    """Return what is said against the rewards that gave one number per step in their trial, or against a
    separator that nothing cuts at."""
    names = ", ".join(rewards.process)
    problems = [
        problem(
            "E353",
            refusal.option,
            tr("{names} returns one number per step, but {words}.", names=names, words=refusal.words),
            "",
            refusal.fix,
        )
        for refusal in (step_refusals(config) if names else ())
    ]
    is_set = "step_separator" in typed and config.step_separator != default_of("step_separator")
    if is_set and rewards.reads_steps is False:
        seen = tr(
            "step_separator is {step_separator!r}, but no reward of this run returns one number "
            "per step or has the argument completion_steps: {reward_funcs}.",
            step_separator=config.step_separator,
            reward_funcs=joined(", ", config.reward_funcs),
        )
        cause = tr(
            "The reward that does is missing from --reward_funcs, or returns one number for a whole "
            "completion."
        )
        fix = Fix(text=tr("leave out --step_separator"))
        problems.append(warning("W108", "step_separator", seen, cause, fix))
    return problems
