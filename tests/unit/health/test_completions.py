"""Repetition, equal siblings and unread answers: what counts, and how much of a rollout is looked at."""

from __future__ import annotations

import random

import pytest

from covey.health.completions import Said, completion_metrics
from covey.rollout.repetition import is_repetitive
from covey.types import Metric

REPETITIVE, IDENTICAL, UNPARSED = (
    f"completions/{name}" for name in ("repetitive_ratio", "identical_groups", "unparsed_ratio")
)
PLAIN = list(range(2000))


def said(groups: list[list[tuple[int, ...]]]) -> list[list[Said]]:
    return [[Said.of(ids) for ids in siblings] for siblings in groups]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        # 17 of 32 are more than half; the rest is all different.
        ([7] * 17 + PLAIN[:15], True),
        ([7] * 16 + PLAIN[100:116], False),
        # A loop of five tokens has five 4-grams of 37.
        ([1, 2, 3, 4, 5] * 8, True),
        # 40 tokens have 37 4-grams; a second copy of the first 20 leaves 20 of them, one of 18 gives 22.
        (PLAIN[:18] * 2 + PLAIN[100:104], False),
        (PLAIN[:1100], False),
        # Of a long completion the last 1,024 tokens.
        (PLAIN[:1500] + [1, 2, 3, 4, 5] * 205, True),
        ([1, 2, 3, 4, 5] * 200 + PLAIN[:1024], False),
    ],
)
def test_what_repeats_itself(ids: list[int], expected: bool) -> None:
    assert is_repetitive(ids) is expected
    assert is_repetitive(tuple(ids)) is expected


def test_shares_of_a_rollout() -> None:
    """Two of six completions repeat, one of two groups with siblings is all the same, one answer of three
    is lost; a group of one has no siblings."""
    groups = [[(1, 2), (1, 2)], [(3,) * 40, (3,) * 41, (4, 5)], [(6,)]]
    assert completion_metrics(said(groups), ["box", "none", None, None, "tag", None]) == {
        REPETITIVE: Metric(value=2 / 6, count=6),
        IDENTICAL: Metric(value=1 / 2, count=2),
        UNPARSED: Metric(value=1 / 3, count=3),
    }
    assert completion_metrics(said([[(1,)]]), [None]) == {REPETITIVE: Metric(value=0.0, count=1)}
    assert completion_metrics([], []) == {}


def test_one_text_for_many_prompts() -> None:
    """Five of eight completions of four prompts are the same; of three prompts nothing is said."""
    groups = [[(1, 2), (1, 2)], [(1, 2), (3,)], [(1, 2), (4,)], [(1, 2), (5,)]]
    found = completion_metrics(said(groups), [], prompts=[1, 2, 3, 4])
    assert found["completions/most_common_ratio"] == Metric(value=5 / 8, count=8)
    few = completion_metrics(said(groups), [], prompts=[1, 2, 3, 1])
    assert few["completions/most_common_ratio"] == Metric(value=None, count=0)


def test_reward_and_length_within_groups() -> None:
    """By hand: lengths 1, 2, 3 with rewards 0, 1, 2 and lengths 1, 3 with rewards 5, 3 give products 2 - 2,
    squares 2 + 2 and 2 + 2; between groups, and where one of the two is level, nothing counts."""
    groups = [[(1,), (1, 2), (1, 2, 3)], [(1,), (1, 2, 3)], [(1,), (1, 2)], [(1,), (2,)], [(1,), (1, 2)]]
    rewards = [[0.0, 1.0, 2.0], [5.0, 3.0], [7.0, 7.0], [0.0, 9.0], [None, 4.0]]
    name = "completions/reward_length_correlation"
    assert completion_metrics(said(groups), [], rewards=rewards)[name] == Metric(value=0.0, count=5)
    only = completion_metrics(said(groups[:1]), [], rewards=rewards[:1])[name]
    assert only.value == pytest.approx(1.0) and only.count == 3
    assert completion_metrics(said(groups[2:]), [], rewards=rewards[2:])[name] == Metric(value=None, count=0)


@pytest.mark.parametrize("num", [128, 129, 1000, 4096])
def test_of_a_large_rollout_a_part_is_looked_at(num: int) -> None:
    """Evenly spread, at most 128 and never less than half of that; equal siblings are looked for in all."""
    draw = random.Random(num)
    looped = (1, 2, 3, 4, 5) * 8
    groups = [[looped if draw.random() < 0.25 else (i, i)] for i in range(num)]
    found = completion_metrics(said(groups), [])[REPETITIVE]
    assert 64 < found.count <= 128
    assert found.value == pytest.approx(0.25, abs=0.15)
    pairs = [[(i, 1), (i, 1 + (i % 4 > 0))] for i in range(num)]
    assert completion_metrics(said(pairs), [])[IDENTICAL] == Metric(
        value=sum(i % 4 == 0 for i in range(num)) / num, count=num
    )
