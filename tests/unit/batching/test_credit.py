"""Credit: which rows enter a group's statistics, leave the loss, and may skip the forward pass."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from covey.batching.credit import RowCredit, credit_samples, needs_forward, row_credits
from covey.batching.samples import to_samples
from covey.batching.select import silences
from covey.errors import GuardStop
from covey.types import AnnotatedSample, Finish, Outcome, ScoredGroup, ScorePart
from support.options import credit


def credits_of(groups, *, scale="none", mask_truncated=False):
    config = credit(scale_rewards=scale, mask_truncated_completions=mask_truncated)
    return row_credits(groups, to_samples(groups), config)


def advantages(groups, **options):
    return [c.advantage for c in credits_of(groups, **options)]


def masks(groups, **options):
    return [c.masked for c in credits_of(groups, **options)]


def test_by_hand(scored_group):
    # (1, 0): mean 1/2. (3, 5, 7): mean 5.
    groups = [scored_group([1.0, 0.0]), scored_group([3.0, 5.0, 7.0])]
    assert advantages(groups) == [0.5, -0.5, -2.0, 0.0, 2.0]
    assert masks(groups) == [None] * 5
    # Sample variances 1/2 and 4.
    root = math.sqrt(0.5) + 1e-4
    expected = [0.5 / root, -0.5 / root, -2 / 2.0001, 0.0, 2 / 2.0001]
    assert advantages(groups, scale="group") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [None, "error", "timeout", "invalid"])
def test_a_row_without_a_valid_score_is_masked_and_counts_nowhere(bad, scored_group):
    groups = [scored_group([4.0, bad, 0.0])]
    assert advantages(groups) == [2.0, 0.0, -2.0]
    assert masks(groups) == [None, "invalid", None]


def lost(group: ScoredGroup, *siblings: int) -> ScoredGroup:
    """The group, of which these siblings have no episode, as their sandbox did not start."""
    episodes = [
        replace(e, outcome=Outcome.INFRASTRUCTURE, sequences=()) if i in siblings else e
        for i, e in enumerate(group.group.episodes)
    ]
    return replace(group, group=replace(group.group, episodes=tuple(episodes)))


def test_an_infrastructure_failure_counts_nowhere(scored_group):
    groups = [lost(scored_group([4.0, 100.0, 0.0]), 1)]
    assert advantages(groups) == [2.0, 0.0, -2.0]
    assert masks(groups) == [None, "infrastructure", None]


def test_one_episode_is_left_alone_in_a_lost_group(scored_group):
    groups = [lost(scored_group([4.0, 1.0, 0.0]), 1, 2), scored_group([1.0, 0.0])]
    assert advantages(groups) == [0.0, 0.0, 0.0, 0.5, -0.5]
    assert masks(groups) == ["infrastructure"] * 3 + [None] * 2
    assert silences(groups, credit(scale_rewards="none")) == [
        "invalid",
        None,
    ]


def test_a_truncated_row_keeps_its_place_in_the_statistics(scored_group):
    groups = [scored_group([4.0, 1.0, 1.0], finishes={1: Finish.LENGTH})]
    assert advantages(groups) == advantages(groups, mask_truncated=True) == [2.0, -1.0, -1.0]
    assert masks(groups) == [None] * 3
    assert masks(groups, mask_truncated=True) == [None, "truncated", None]


def test_invalid_says_more_than_truncated(scored_group):
    groups = [scored_group(["error", 1.0], finishes={0: Finish.LENGTH, 1: Finish.LENGTH})]
    assert masks(groups, mask_truncated=True) == ["invalid", "truncated"]


def test_an_empty_completion_is_out_of_the_loss(scored_group):
    assert masks([scored_group([1.0, 0.0], lengths=[0, 3])]) == ["empty", None]


def test_forward_only_where_a_gradient_can_be():
    signal, flat = RowCredit(advantage=0.5, masked=None), RowCredit(advantage=0.0, masked=None)
    masked = RowCredit(advantage=0.5, masked="truncated")
    cases = [(c, skip) for c in (signal, flat, masked) for skip in (True, False)]
    # A row without advantage is forwarded where a KL term may reach it; a masked one never is.
    assert [needs_forward(c, may_skip_rows=s) for c, s in cases] == [True, True, False, True, False, False]


@pytest.mark.parametrize("may_skip", [True, False])
def test_credited_samples(may_skip, scored_group):
    groups = [scored_group([1.0, 0.0, None], lengths=[2, 3, 4]), scored_group([2.0, 2.0, 2.0])]
    samples = to_samples(groups)
    annotated = [AnnotatedSample(sample=s) for s in samples]
    rows = credit_samples(annotated, credits_of(groups), may_skip_rows=may_skip)
    assert [r.annotated.sample for r in rows] == samples
    assert [r.advantage for r in rows] == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert [tuple(r.loss_mask.tolist()) for r in rows[:3]] == [(True,) * 2, (True,) * 3, (False,) * 4]
    assert [r.masked for r in rows] == [None, None, "invalid", None, None, None]
    assert [r.needs_forward for r in rows] == [True, True, False, *[not may_skip] * 3]


def _of_tasks(scored_group):
    """A group whose first reward spoke and one whose second did: (1, 0) and (6, 2)."""

    def parted(scored, name):
        scores = tuple(
            replace(
                s, parts=tuple(ScorePart(name=n, value=s.total if n == name else None) for n in ("a", "b"))
            )
            for s in scored.scores
        )
        return replace(scored, scores=scores)

    return [parted(scored_group([1.0, 0.0]), "a"), parted(scored_group([6.0, 2.0]), "b")]


def test_rewards_of_tasks_under_gdpo(scored_group):
    both = {"reward_funcs": ["accuracy", "format"], "reward_weights": [1.0, 3.0]}
    config = credit(scale_rewards="gdpo", **both)
    groups = _of_tasks(scored_group)
    found = [c.advantage for c in row_credits(groups, to_samples(groups), config)]
    # Each in units of its own spread, sqrt(1/2) and sqrt(8); the second with weight 3.
    one, two = 0.5 / (math.sqrt(0.5) + 1e-4), 3 * 2.0 / (math.sqrt(8.0) + 1e-4)
    sums = [one, -one, two, -two]
    spread = statistics.stdev(sums) + 1e-4
    assert found == pytest.approx([s / spread for s in sums], rel=1e-6)


def test_real_refuses_several_rows_of_a_completion_before_they_are_credited(scored_group):
    groups = [scored_group([1.0, 0.0]), scored_group([1.0, 0.0])]
    samples = to_samples(groups)
    several = [*samples[:3], samples[2], samples[3]]
    plain = credit()
    real = credit(loss_type="real")
    assert len(row_credits(groups, samples, real)) == 4
    # Every other loss takes them; the rows of a completion have its advantage.
    credits = row_credits(groups, several, plain)
    assert credits[2] == credits[3] and credits[2].advantage == -credits[4].advantage
    with pytest.raises(GuardStop, match="1 of 4 completions have several rows") as stop:
        row_credits(groups, several, real)
    finding = stop.value.finding
    assert finding.code == "F137" and "completion 0 of group 1 has 2" in finding.seen
    assert finding.fixes[0].edits == {"loss_type": "dapo"}
