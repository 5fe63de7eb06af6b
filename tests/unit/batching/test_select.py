"""Which groups have signal, by hand, and how strong one is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from covey.algorithm.advantages import STD_EPSILON
from covey.batching.select import silences, strength
from covey.types import Finish, ScoredGroup, ScorePart
from support.options import credit

Make = Callable[..., ScoredGroup]
TWO = {"reward_funcs": ["accuracy", "format"], "reward_weights": [1.0, 2.0]}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_equal_rewards_are_silent(scored_group: Make, scale: Any, estimator: Any) -> None:
    """Also where a sum in another order makes them differ in the last bits."""
    groups = [
        scored_group([1.0, 0.0, 0.0]),
        scored_group([1.0, 1.0, 1.0]),
        scored_group([0.1 + 0.2, 0.3, 0.3]),
        scored_group([0.0, 0.0, 1e-3]),
    ]
    found = silences(groups, credit(scale_rewards=scale, advantage_estimator=estimator))
    assert found == [None, "equal", "equal", None]
    assert [
        silences([g], credit(scale_rewards=scale, advantage_estimator=estimator))[0] for g in groups
    ] == found
    assert silences([], credit()) == []


def test_fewer_than_two_rewards_are_silent(scored_group: Make) -> None:
    groups = [
        scored_group([1.0, None, "error"]),
        scored_group(["error", "timeout", None]),
        scored_group([1.0, "error", 0.0]),
        scored_group([1.0, "error", 1.0]),
    ]
    assert silences(groups, credit()) == ["invalid", "invalid", None, "equal"]


def test_advantages_of_masked_rows_alone_are_silent(scored_group: Make) -> None:
    cut = {0: Finish.LENGTH, 1: Finish.LENGTH, 2: Finish.LENGTH}
    groups = [
        scored_group([1.0, 0.0, 0.5], finishes=cut),
        # The row that stays has the mean reward, so an advantage of 0.
        scored_group([1.0, 0.0, 0.5], finishes={0: Finish.LENGTH, 1: Finish.LENGTH}),
        scored_group([1.0, 0.0, 0.0], finishes={0: Finish.LENGTH}),
        scored_group([1.0, 0.0], lengths=[0, 0]),
    ]
    assert silences(groups, credit(mask_truncated_completions=True)) == ["masked", "masked", None, "masked"]
    assert silences(groups, credit()) == [None, None, None, "masked"]
    # The loss real trains each row of a group with signal, whatever its advantage.
    real = credit(mask_truncated_completions=True, loss_type="real")
    assert silences(groups, real) == ["masked", None, None, "masked"]


def test_gdpo_hears_rewards_that_cancel_in_their_sum(scored_group: Make) -> None:
    """Both rewards differ; their sums are equal. In units of their own spread they do not cancel."""
    parts = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0)]
    made = scored_group([1.0, 1.0, 1.0])
    scores = tuple(
        type(s)(total=1.0, parts=tuple(ScorePart(name=n, value=v) for n, v in zip("ab", p, strict=True)))
        for s, p in zip(made.scores, parts, strict=True)
    )
    group = ScoredGroup(group=made.group, scores=scores)
    assert silences([group], credit(**TWO)) == ["equal"]
    assert silences([group], credit(scale_rewards="gdpo", **TWO)) == [None]


def test_a_divergence_that_rewards_pay_for_is_no_signal(scored_group: Make) -> None:
    assert silences([scored_group([1.0, 1.0])], credit(kl_in_reward=True, beta=0.5)) == ["equal"]


@pytest.mark.parametrize(
    ("totals", "deviations", "spread"),
    [
        ([1.0, 1.0, 0.0, 0.0], 2.0, math.sqrt(1 / 3)),
        ([1.0, 0.0, 0.0, 0.0], 1.5, 0.5),
        ([3.0, None, 0.0, 0.0], 4.0, math.sqrt(3.0)),
    ],
)
def test_strength_is_that_of_trl(
    scored_group: Make, totals: list[float | None], deviations: float, spread: float
) -> None:
    """The sum of |A| times the spread."""
    expected = deviations / (spread + STD_EPSILON) * spread
    assert strength(scored_group(totals)) == pytest.approx(expected, rel=1e-12)


def test_silence_has_no_strength(scored_group: Make) -> None:
    assert [strength(scored_group(t)) for t in ([1.0, 1.0], [1.0, None], ["error", "error"])] == [0, 0, 0]
