"""F129: a reward of steps that a run cannot use stops it at the rollout where it is first seen."""

from __future__ import annotations

from typing import Any

import pytest

from covey.config import from_dict
from covey.errors import GuardStop
from covey.health.guards.steps import check_steps
from covey.health.rewards import RewardWatch
from covey.plan.step_refusals import step_refusals
from covey.rewards.registry import total
from covey.training.measure import reward_metrics
from covey.types import ScorePart
from support.checks import BASE
from support.groups import episode, scored


def rollout(*rows: Any, name: str = "prm") -> Any:
    """A group whose rows have a list of numbers, a number, or no word."""
    scores = []
    for row in rows:
        steps = tuple(row) if isinstance(row, list) else None
        mean = (sum(steps) / len(steps) if steps else None) if steps is not None else row
        scores.append(total([ScorePart(name=name, value=mean, steps=steps)], [1.0]))
    return scored([episode() for _ in rows], scores)


def test_lists_and_numbers_of_one_reward_stop_the_run() -> None:
    check_steps([rollout([1.0, 0.0], [], None, [0.5])], (), 1)
    check_steps([rollout(1.0, None, 0.0)], (), 1)
    with pytest.raises(GuardStop) as stop:
        check_steps([rollout([1.0], [0.0]), rollout(None, 0.5)], (), 4)
    assert stop.value.finding.code == "F129"
    assert stop.value.finding.seen == (
        "step 4: the reward prm returned lists for 2 of 3 completions and numbers for the others"
    )


def test_what_needs_one_number_per_completion_stops_the_run() -> None:
    refused = step_refusals(from_dict({**BASE, "loss_type": "real", "advantage_estimator": "rloo"}).config)
    check_steps([rollout(1.0, 0.0)], refused, 1)
    with pytest.raises(GuardStop) as stop:
        check_steps([rollout([1.0], [0.0])], refused, 1)
    assert "one number per step, but advantage_estimator is rloo" in stop.value.finding.seen
    assert [fix.edits for fix in stop.value.finding.fixes] == [
        {"advantage_estimator": "grpo"},
        {"loss_type": "dapo"},
    ]


def test_a_group_without_spread_is_one_whose_steps_are_equal() -> None:
    def flat(*groups: Any) -> float | None:
        return reward_metrics(groups)["frac_reward_zero_std"].value

    # Equal means of different steps are a spread, and so are the steps of a single completion.
    assert flat(rollout([1.0, 0.0], [0.0, 1.0])) == 0.0
    assert flat(rollout([1.0, 0.0], [])) == 0.0
    assert flat(rollout([0.5, 0.5], [0.5])) == 1.0
    assert flat(rollout([], [])) == 1.0
    assert flat(rollout(0.5, 0.5), rollout(0.5, 1.0)) == 0.5
    metrics = reward_metrics([rollout([1.0, 0.0], [1.0], [])])
    assert (metrics["rewards/prm/mean"].value, metrics["rewards/prm/mean"].count) == (0.75, 2)


def test_steps_that_differ_are_not_one_value() -> None:
    """F108 is of a reward with one value throughout, not of equal means."""

    def said(*groups: Any) -> list[str]:
        return [f.seen for f in RewardWatch().check(groups, 0)]

    assert said(rollout([1.0, 0.0], [0.0, 1.0])) == []
    assert said(rollout([0.5, 0.5], [0.5])) == ["prm is 0.5 for all 2 completions of the first rollout."]
