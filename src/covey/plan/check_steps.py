"""What rewards of steps do not go with: parts of an algorithm that need one advantage per completion."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from covey.options.schema import Config, default_of
from covey.plan.facts import Facts
from covey.plan.problem import problem, warning
from covey.types import Fix, Problem

_ESTIMATORS = {
    "rloo": "whose baseline is made of the other completions: the steps of one are no samples of each other",
    "reinforce_plus_plus": "which compares whole completions over the rollout, and has no formula for steps",
}
_SCALES = {"gdpo": "which divides the sums of whole completions once more by their spread"}
_LEVELS = {"sequence": "whose gradient gives every token the mean of the advantages of all"}
_IN_REWARD = "which takes the divergence off the one reward of a completion"
_LOSSES = {
    "real": "which tells good completions from others: each is the one or the other",
    "vespo": "which weighs a completion as a whole, in one way where its advantage is 0 or above and in "
    "another below",
    "fipo": "which weighs a token by how much likelier the tokens behind it became: these have to have the "
    "advantage that it has",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRefusal:
    """An option that has no meaning with one number per step, why, and what to set instead."""

    option: str
    words: str
    fix: Fix


def step_refusals(config: Config) -> tuple[StepRefusal, ...]:
    """What in a configuration needs one advantage per completion."""
    grpo = Fix(text="compare within groups", edits={"advantage_estimator": "grpo"})
    spread = Fix(text="the spread of the group", edits={"scale_rewards": "group"})
    dapo = Fix(text="another loss", edits={"loss_type": "dapo"})
    level = Fix(text="the ratio of GSPO-token", edits={"importance_sampling_level": "sequence_token"})
    in_loss = Fix(text="the divergence in the loss", edits={"kl_in_reward": False})
    has_kl = config.kl_in_reward and bool(config.beta or config.beta_end)
    refusals = (
        ("advantage_estimator", _ESTIMATORS.get(config.advantage_estimator), grpo),
        ("scale_rewards", _SCALES.get(config.scale_rewards), spread),
        ("loss_type", _LOSSES.get(config.loss_type), dapo),
        ("importance_sampling_level", _LEVELS.get(config.importance_sampling_level), level),
        ("kl_in_reward", _IN_REWARD if has_kl else None, in_loss),
    )
    return tuple(
        StepRefusal(option=option, words=f"{option} is {_shown(getattr(config, option))}, {why}", fix=fix)
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
            f"One number per step comes from {names}, and {refusal.words}.",
            "Parts of two recipes in one command.",
            refusal.fix,
        )
        for refusal in (step_refusals(config) if names else ())
    ]
    is_set = "step_separator" in typed and config.step_separator != default_of("step_separator")
    if is_set and facts.reads_steps is False:
        seen = (
            f"step_separator is {config.step_separator!r}, and no reward of this run gives one number per "
            f"step or names completion_steps: {', '.join(config.reward_funcs)}."
        )
        cause = "The reward that gives them was left out of --reward_funcs, or gives one number for all."
        fix = Fix(text="leave out --step_separator")
        problems.append(warning("W108", "step_separator", seen, cause, fix))
    return problems
