"""pass@k against hand-worked values and brute force, and what counts as the best evaluation."""

from __future__ import annotations

import itertools

import pytest

from covey.training.evaluate import Best, pass_at_k
from covey.types import Metric

# (completions, right ones, k): 1 - C(wrong, k) / C(completions, k), worked by hand.
BY_HAND = {
    (4, 1, 1): 1 / 4,
    (4, 1, 2): 1 / 2,  # 1 - 3/6
    (4, 2, 2): 5 / 6,  # 1 - 1/6
    (4, 3, 2): 1.0,
    (4, 0, 4): 0.0,
    (5, 2, 3): 9 / 10,  # 1 - 1/10
    (1, 1, 1): 1.0,
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_by_hand(case):
    assert pass_at_k(*case) == pytest.approx(BY_HAND[case], rel=1e-12)


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_against_every_choice(num):
    for right in range(num + 1):
        answers = [1] * right + [0] * (num - right)
        for k in range(1, num + 1):
            drawn = list(itertools.combinations(answers, k))
            expected = sum(any(d) for d in drawn) / len(drawn)
            assert pass_at_k(num, right, k) == pytest.approx(expected, abs=1e-12)


def seen(best, *values):
    """What each value of a sequence of evaluations does: is it the best, and how many worse in a row."""
    found = []
    for step, value in enumerate(values):
        is_best = best.update({"eval_reward": Metric(value=value)}, step)
        found.append((is_best, best.num_worse))
    return found


def test_the_best_is_strictly_better():
    best = Best("eval_reward", greater_is_better=True)
    assert seen(best, 0.5, 0.5, 0.4, 0.6, None) == [(True, 0), (False, 1), (False, 2), (True, 0), (False, 1)]
    assert (best.value, best.step) == (0.6, 3)


def test_smaller_may_be_better():
    best = Best("eval_reward", greater_is_better=False)
    assert seen(best, 0.5, 0.6, -0.1) == [(True, 0), (False, 1), (True, 0)]


def test_it_is_kept_over_a_resume():
    best = Best("eval_reward", greater_is_better=True)
    seen(best, 0.5, 0.4)
    other = Best("eval_reward", greater_is_better=True)
    other.load_state(best.state())
    assert (other.value, other.step, other.num_worse) == (0.5, 0, 1)


def test_an_evaluation_without_the_metric_is_not_the_best():
    best = Best("eval_pass@2", greater_is_better=True)
    assert not best.update({"eval_reward": Metric(value=1.0)}, 1)
    assert (best.value, best.step, best.num_worse) == (None, None, 1)
