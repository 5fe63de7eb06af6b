"""What rewards of steps do not go with: parts of an algorithm that need one advantage per completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.algorithm.loss_types.registry import loss_named
from covey.options.schema import Config
from covey.texts import tr
from covey.types import Fix

_ESTIMATORS = {
    "rloo": tr(
        "whose baseline is the mean of the other completions; the steps of one completion are not "
        "samples of each other"
    ),
    "reinforce_plus_plus": tr(
        "which compares whole completions over the rollout and is not defined for steps"
    ),
}
_SCALES = {
    "gdpo": tr("which divides the sums of whole completions by their standard deviation a second time")
}
_LEVELS = {"sequence": tr("whose gradient gives every token the mean advantage of all tokens")}
_IN_REWARD = tr("which subtracts the KL from the single reward of a completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRefusal:
    """An option that has no meaning with one number per step, why, and what to set instead."""

    option: str
    words: str
    fix: Fix


def step_refusals(config: Config) -> tuple[StepRefusal, ...]:
    """What in a configuration needs one advantage per completion."""
    grpo = Fix(text=tr("compare completions within their group"), edits={"advantage_estimator": "grpo"})
    spread = Fix(
        text=tr("divide by the standard deviation within the group"), edits={"scale_rewards": "group"}
    )
    dapo = Fix(text=tr("use another loss"), edits={"loss_type": "dapo"})
    level = Fix(text=tr("use the ratio of GSPO-token"), edits={"importance_sampling_level": "sequence_token"})
    in_loss = Fix(text=tr("put the KL into the loss"), edits={"kl_in_reward": False})
    has_kl = config.kl_in_reward and bool(config.beta or config.beta_end)
    refusals = (
        ("advantage_estimator", _ESTIMATORS.get(config.advantage_estimator), grpo),
        ("scale_rewards", _SCALES.get(config.scale_rewards), spread),
        ("loss_type", loss_named(config.loss_type).per_completion or None, dapo),
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
