"""What rewards of steps do not go with: parts of an algorithm that need one advantage per completion."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from covey.config.schema import Config, default_of
from covey.plan.facts import Facts
from covey.plan.problem import problem, warning
from covey.types import Fix, Problem

_ESTIMATORS = {
    "rloo": "whose baseline is made of the other completions: the steps of one are no samples of each other",
    "reinforce_plus_plus": "which compares whole completions over the rollout, and has no formula for steps",
}
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
    estimator, loss = config.advantage_estimator, config.loss_type
    found = []
    if estimator in _ESTIMATORS:
        fix = Fix(text="compare within groups", edits={"advantage_estimator": "grpo"})
        found.append(("advantage_estimator", f"{estimator}, {_ESTIMATORS[estimator]}", fix))
    if config.scale_rewards == "gdpo":
        words = "gdpo, which divides the sums of whole completions once more by their spread"
        found.append(("scale_rewards", words, Fix(text="one spread", edits={"scale_rewards": "group"})))
    if loss in _LOSSES:
        fix = Fix(text="a loss of tokens", edits={"loss_type": "dapo"})
        found.append(("loss_type", f"{loss}, {_LOSSES[loss]}", fix))
    if config.importance_sampling_level == "sequence":
        words = "sequence: the gradient of its ratio gives every token the mean of all their advantages"
        fix = Fix(text="GSPO for tokens", edits={"importance_sampling_level": "sequence_token"})
        found.append(("importance_sampling_level", words, fix))
    if config.kl_in_reward and (config.beta or config.beta_end):
        words = "on, which takes the divergence off a completion's one reward"
        fix = Fix(text="the divergence in the loss", edits={"kl_in_reward": False})
        found.append(("kl_in_reward", words, fix))
    return tuple(StepRefusal(option=o, words=f"{o} is {words}", fix=fix) for o, words, fix in found)


def step_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what is said against the rewards that gave one number per step in their trial, or against a
    separator that nothing cuts at."""
    names = ", ".join(facts.process_rewards)
    verb = "give" if len(facts.process_rewards) > 1 else "gives"
    found = [
        problem(
            "E353",
            refusal.option,
            f"{names} {verb} one number per step, and {refusal.words}.",
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
        found.append(warning("W108", "step_separator", seen, cause, Fix(text="leave out --step_separator")))
    return found
