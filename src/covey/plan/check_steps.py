"""What rewards of steps do not go with: parts of an algorithm that need one advantage per completion."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from covey.options.schema import Config, default_of
from covey.plan.facts import Facts
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem

_ESTIMATORS = {
    "rloo": tr(
        "whose baseline is made of the other completions: the steps of one are no samples of each other"
    ),
    "reinforce_plus_plus": tr(
        "which compares whole completions over the rollout, and has no formula for steps"
    ),
}
_SCALES = {"gdpo": tr("which divides the sums of whole completions once more by their spread")}
_LEVELS = {"sequence": tr("whose gradient gives every token the mean of the advantages of all")}
_IN_REWARD = tr("which takes the divergence off the one reward of a completion")
_LOSSES = {
    "real": tr("which tells good completions from others: each is the one or the other"),
    "vespo": tr(
        "which weighs a completion as a whole, in one way where its advantage is 0 or above "
        "and in another below"
    ),
    "fipo": tr(
        "which weighs a token by how much likelier the tokens behind it became: these have "
        "to have the advantage that it has"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRefusal:
    """An option that has no meaning with one number per step, why, and what to set instead."""

    option: str
    words: str
    fix: Fix


def step_refusals(config: Config) -> tuple[StepRefusal, ...]:
    """What in a configuration needs one advantage per completion."""
    grpo = Fix(text=tr("compare within groups"), edits={"advantage_estimator": "grpo"})
    spread = Fix(text=tr("the spread of the group"), edits={"scale_rewards": "group"})
    dapo = Fix(text=tr("another loss"), edits={"loss_type": "dapo"})
    level = Fix(text=tr("the ratio of GSPO-token"), edits={"importance_sampling_level": "sequence_token"})
    in_loss = Fix(text=tr("the divergence in the loss"), edits={"kl_in_reward": False})
    has_kl = config.kl_in_reward and bool(config.beta or config.beta_end)
    refusals = (
        ("advantage_estimator", _ESTIMATORS.get(config.advantage_estimator), grpo),
        ("scale_rewards", _SCALES.get(config.scale_rewards), spread),
        ("loss_type", _LOSSES.get(config.loss_type), dapo),
        ("importance_sampling_level", _LEVELS.get(config.importance_sampling_level), level),
        ("kl_in_reward", _IN_REWARD if has_kl else None, in_loss),
    )
    return tuple(
        StepRefusal(
            option=option,
            words=tr(
                "{option} is {shown}, {why}", option=option, shown=_shown(getattr(config, option)), why=why
            ),
            fix=fix,
        )
        for option, why, fix in refusals
        if why is not None
    )


def _shown(value: Any) -> str:
    return "on" if value is True else str(value)


def step_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what is said against the rewards that gave one number per step in their trial, or against a
    separator that nothing cuts at."""
    names = ", ".join(facts.process_rewards)
    problems = [
        problem(
            "E353",
            refusal.option,
            tr("One number per step comes from {names}, and {words}.", names=names, words=refusal.words),
            tr("Parts of two recipes in one command."),
            refusal.fix,
        )
        for refusal in (step_refusals(config) if names else ())
    ]
    is_set = "step_separator" in typed and config.step_separator != default_of("step_separator")
    if is_set and facts.reads_steps is False:
        seen = tr(
            "step_separator is {step_separator!r}, and no reward of this run gives one number "
            "per step or names completion_steps: {reward_funcs}.",
            step_separator=config.step_separator,
            reward_funcs=", ".join(config.reward_funcs),
        )
        cause = tr("The reward that gives them was left out of --reward_funcs, or gives one number for all.")
        fix = Fix(text=tr("leave out --step_separator"))
        problems.append(warning("W108", "step_separator", seen, cause, fix))
    return problems
