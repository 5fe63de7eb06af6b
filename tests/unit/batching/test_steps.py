"""Credit of steps: numbers worked by hand, a slow loop in float64, and what enters which statistic.

The numbers of all steps of a group are centred and divided together; a token gets the sum over the steps that
end at it or behind it. Outcomes of the same run are compared apart and added.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
import torch

from covey.batching.credit import credit_samples, needs_forward, row_credits
from covey.batching.pack import pack
from covey.batching.samples import to_samples
from covey.errors import GuardStop
from covey.health.guards.batch import check_batches, planned_loss
from covey.health.guards.rollout import RolloutFacts, check_rollout
from covey.rewards.registry import total
from covey.types import AnnotatedSample, Finish, Outcome, Score, ScorePart, Status
from support.options import credit

PLAIN = credit(scale_rewards="none")
GROUP = credit(scale_rewards="group")
BATCH = credit(scale_rewards="batch")


def score(steps, ends=(), *, outcome=None, weights=(1.0, 1.0), name="prm"):
    """The score of a row whose process reward gave `steps` (None: no word), and an outcome beside it."""
    mean = statistics.fmean(steps) if steps else None
    parts = [ScorePart(name=name, value=mean, steps=None if steps is None else tuple(steps))]
    parts.append(ScorePart(name="outcome", value=outcome))
    return total(parts, weights, tuple(ends))


@pytest.fixture
def group(scored_group):
    """A group with these scores; its rows have as many tokens as their last step ends at, or `lengths`."""

    def make(scores, lengths=None, **changes):
        lengths = lengths or [s.steps.ends[-1] if s.steps and s.steps.ends else 3 for s in scores]
        made = scored_group([0.0] * len(scores), lengths=lengths, **changes)
        return replace(made, scores=tuple(scores))

    return make


def tokens(groups, config=PLAIN):
    """The advantages of every row's tokens."""
    samples = to_samples(groups)
    credits = row_credits(groups, samples, config)
    rows = credit_samples([AnnotatedSample(sample=s) for s in samples], credits, may_skip_rows=True)
    return [list(row.advantages) for row in rows]


def test_a_token_has_the_sum_of_the_steps_from_its_own_on(group):
    # Steps 1, 0 and 0.5, 0.5, 0.5: their mean is 0.5.
    two = group([score([1.0, 0.0], [2, 5]), score([0.5, 0.5, 0.5], [1, 2, 4])])
    assert tokens([two]) == [[0.0, 0.0, -0.5, -0.5, -0.5], [0.0] * 4]
    # Steps 3, 1 and 2, 2: mean 2, sample deviation sqrt(2 / 3).
    two = group([score([3.0, 1.0], [1, 2]), score([2.0, 2.0], [1, 2])])
    unit = 1 / ((2 / 3) ** 0.5 + 1e-4)
    assert tokens([two], GROUP)[0] == pytest.approx([0.0, -unit], rel=1e-6)
    # A number of one step is compared with the steps of all siblings.
    two = group([score([1.0], [3]), score([0.0, 0.0], [1, 2])])
    assert tokens([two])[0] == pytest.approx([2 / 3] * 3)
    assert tokens([two])[1] == pytest.approx([-2 / 3, -1 / 3])


def test_the_spread_is_of_the_group_the_rollout_or_none(group):
    groups = [
        group([score([3.0, 1.0], [1, 2]), score([2.0], [1])]),
        group([score([9.0], [1]), score([1.0, 2.0], [1, 2])], first=200),
    ]
    # Group 0 has the mean 2, group 1 the mean 4.
    centred = [[0.0, -1.0], [0.0], [5.0], [-5.0, -2.0]]
    assert tokens(groups) == centred
    own = [statistics.stdev([3.0, 1.0, 2.0])] * 2 + [statistics.stdev([9.0, 1.0, 2.0])] * 2
    for found, row, spread in zip(tokens(groups, GROUP), centred, own, strict=True):
        assert found == pytest.approx([v / (spread + 1e-4) for v in row], rel=1e-6)
    whole = statistics.stdev([3.0, 1.0, 2.0, 9.0, 1.0, 2.0])
    for found, row in zip(tokens(groups, BATCH), centred, strict=True):
        assert found == pytest.approx([v / (whole + 1e-4) for v in row], rel=1e-6)


def test_outcomes_are_compared_apart_and_added(group):
    both = group([score([1.0, 0.0], [1, 2], outcome=1.0), score([0.5, 0.5], [1, 3], outcome=0.0)])
    assert tokens([both]) == [[0.5, 0.0], [-0.5] * 3]
    # A weight of a process reward multiplies its advantages, one of an outcome its value.
    for config in (PLAIN, GROUP, BATCH):
        one, other = (
            tokens([group([score(s, e, outcome=o, weights=w) for s, e, o in rows])], config)
            for w, rows in (
                ((0.2, 1.0), (([1.0, 0.0], [1, 2], 1.0), ([0.5, 0.5], [1, 3], 1.0))),
                ((1.0, 1.0), (([1.0, 0.0], [1, 2], 1.0), ([0.5, 0.5], [1, 3], 1.0))),
            )
        )
        assert one[0] == pytest.approx([0.2 * v for v in other[0]], rel=1e-6)
        assert any(other[0])
    # Of weight 0 nothing is left, of a negative one the opposite.
    rows = (([1.0, 0.0], [1, 2]), ([0.5, 0.5], [1, 3]))
    assert tokens([group([score(s, e, weights=(0.0, 1.0)) for s, e in rows])]) == [[0.0] * 2, [0.0] * 3]
    assert tokens([group([score(s, e, weights=(-1.0, 1.0)) for s, e in rows])])[0] == [0.0, 0.5]


def test_rows_without_a_word_and_failed_ones(group):
    failed = Score(total=None, parts=(), status=Status.ERROR)
    made = group(
        [
            score([1.0, 0.0], [1, 2], outcome=1.0),
            score(None, outcome=0.0),  # The process reward has no word on it.
            score([], outcome=None),  # An empty completion: no step, and no outcome.
            failed,
            score([0.5], [2], outcome=None),  # The outcome has none.
        ],
        lengths=[2, 3, 1, 2, 2],
    )
    samples = to_samples([made])
    credits = row_credits([made], samples, PLAIN)
    assert [c.masked for c in credits] == [None, None, None, "invalid", None]
    # Steps 1, 0, 0.5 have the mean 0.5, outcomes 1 and 0 too.
    assert tokens([made]) == [[0.5, 0.0], [-0.5] * 3, [0.0], [0.0] * 2, [0.0] * 2]
    # What is left out of a group changes no number of the others.
    lost = [*made.group.episodes[:4], replace(made.group.episodes[4], outcome=Outcome.INFRASTRUCTURE)]
    assert tokens([replace(made, group=replace(made.group, episodes=tuple(lost)))])[0] == [0.5, 0.0]


def test_a_cut_row_counts_and_leaves_the_loss(group):
    made = group([score([1.0, 0.0], [1, 2]), score([0.5], [2])], finishes={0: Finish.LENGTH})
    config = credit(scale_rewards="none", mask_truncated_completions=True)
    credits = row_credits([made], to_samples([made]), config)
    assert [c.masked for c in credits] == ["truncated", None]
    assert not needs_forward(credits[0], may_skip_rows=True)


@pytest.mark.parametrize("config", [PLAIN, GROUP, BATCH])
def test_one_step_with_the_outcomes_value_is_the_outcome_run_to_the_bit(config, group, scored_group):
    draw = random.Random(1)
    values = [[draw.choice((0.0, 0.3, 1.0, None)) for _ in range(5)] for _ in range(7)]
    ends = [[draw.randrange(1, 6) for _ in row] for row in values]
    outcome, process = [], []
    for row, lengths in zip(values, ends, strict=True):
        own = [Score(total=None, parts=(), status=Status.ERROR) if v is None else None for v in row]
        of = [o or score(None, outcome=v) for o, v in zip(own, row, strict=True)]
        outcome.append(group(of, lengths=lengths))
        steps = [o or score([v], [n]) for o, v, n in zip(own, row, lengths, strict=True)]
        process.append(group(steps, lengths=lengths))
    samples = to_samples(outcome)
    assert row_credits(process, samples, config) == row_credits(outcome, samples, config)
    assert tokens(process, config) == tokens(outcome, config)


def oracle(groups, scale):
    """Loops over steps, in Python's floats."""
    out = []
    everything = [n for rows in groups for steps, _ in rows for n in steps]
    for rows in groups:
        pooled = [n for steps, _ in rows for n in steps]
        mean = sum(pooled) / len(pooled)
        spread = {"none": None, "group": pooled, "batch": everything}[scale]
        divisor = 1.0 if spread is None else statistics.stdev(spread) + 1e-4
        for steps, ends in rows:
            values = []
            for token in range(ends[-1]):
                gain = 0.0
                for number, end in zip(steps, ends, strict=True):
                    if end > token:
                        gain += (number - mean) / divisor
                values.append(gain)
            out.append(values)
    return out


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_against_a_slow_loop(scale, group, assert_close_guarded):
    draw = random.Random(5)
    given = []
    for _ in range(4):
        rows = []
        for _ in range(6):
            count = draw.randrange(1, 6)
            ends = sorted(draw.sample(range(1, 20), count))
            rows.append(([draw.uniform(-1, 1) for _ in ends], ends))
        given.append(rows)
    groups = [group([score(s, e) for s, e in rows], first=1000 * i) for i, rows in enumerate(given)]
    found = tokens(groups, credit(scale_rewards=scale))
    flat, wanted = [v for row in found for v in row], [v for row in oracle(given, scale) for v in row]
    assert_close_guarded(flat, wanted, 1e-6)
    # Siblings and groups in another order have the same numbers.
    turned = [
        replace(g, scores=g.scores[::-1], group=replace(g.group, episodes=g.group.episodes[::-1]))
        for g in groups[::-1]
    ]
    assert_close_guarded(
        [v for row in tokens(turned, credit(scale_rewards=scale))[::-1] for v in row], wanted, 1e-6
    )


def test_equal_steps_teach_nothing(group):
    for rows in ([[0.1, 0.1], [0.1]], [[0.7], [0.7]]):
        made = group([score(steps, range(1, len(steps) + 1)) for steps in rows])
        credits = row_credits([made], to_samples([made]), GROUP)
        assert [c.advantage for c in credits] == [0.0, 0.0]
        assert not any(needs_forward(c, may_skip_rows=True) for c in credits)
    # One completion alone is compared with itself: its steps may differ.
    alone = group([score([1.0, 0.0], [1, 2])])
    assert tokens([alone]) == [[0.0, -0.5]]


def test_a_row_with_some_tokens_at_0_takes_part(group, pack_plan):
    made = group([score([1.0, 0.0], [2, 5]), score([0.5, 0.5], [1, 4])])
    samples = to_samples([made])
    credits = row_credits([made], samples, PLAIN)
    assert credits[0].token_advantages.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert credits[0].advantage == -0.3
    rows = credit_samples([AnnotatedSample(sample=s) for s in samples], credits, may_skip_rows=True)
    assert [r.needs_forward for r in rows] == [True, False]
    (batch,) = pack(rows, pack_plan(completions_per_rank=2), 0)
    (micro,) = batch.micro_batches
    assert micro.advantage_N.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert micro.advantage_N.dtype == torch.float32
    assert batch.has_signal == (True,) and batch.denominators.num_tokens == 9


def test_steps_that_cancel_are_no_signal(group, pack_plan):
    """Two rows begin alike, with opposite advantages there and none behind: the gradient is exactly 0."""

    def signal(first, second, lengths):
        made = group([score(first, (1, lengths[0])), score(second, (1, lengths[1]))], lengths=list(lengths))
        samples = [
            replace(s, tokens=replace(s.tokens, token_ids=(*s.token_ids[:2], 50, *s.token_ids[3:])))
            for s in to_samples([made])
        ]
        credits = row_credits([made], samples, PLAIN)
        rows = credit_samples([AnnotatedSample(sample=s) for s in samples], credits, may_skip_rows=True)
        (batch,) = pack(rows, pack_plan(completions_per_rank=2), 0)
        return batch.has_signal

    # 1, 0.5 and 0, 0.5: the first tokens have 0.5 and -0.5, the others 0.
    assert signal([1.0, 0.5], [0.0, 0.5], (3, 3)) == (False,)
    assert signal([1.0, 0.5], [0.5, 0.0], (3, 3)) == (True,)


def test_a_token_with_another_advantage_is_found_before_it_is_trained_on(group, pack_plan):
    """F113 in the tensors of a step, and F113 in rows whose steps do not add up."""
    made = group([score([1.0, 0.0], [2, 5]), score([0.5, 0.0], [1, 4])])
    samples = to_samples([made])
    credits = row_credits([made], samples, PLAIN)
    rows = credit_samples([AnnotatedSample(sample=s) for s in samples], credits, may_skip_rows=True)
    plan = pack_plan(completions_per_rank=2)
    check_batches(pack(rows, plan, 0), rows, plan, 1)
    mean = [replace(row, token_advantages=None) for row in rows]
    shifted = [replace(row, token_advantages=row.advantages[::-1]) for row in rows]
    facts = RolloutFacts(
        step=1, num_generations=2, num_episodes=2, scaled_by="group", is_over_rollout=False, version=3
    )
    check_rollout([made], rows, facts)
    for wrong in (
        mean,
        shifted,
        [replace(r, token_advantages=tuple(2 * a for a in r.advantages)) for r in rows],
    ):
        with pytest.raises(GuardStop, match="advantages"):
            check_batches(pack(wrong, plan, 0), rows, plan, 1)
    for wrong in ([rows[0], mean[1]], [shifted[0], rows[1]]):
        with pytest.raises(GuardStop) as stop:
            check_rollout([made], wrong, facts)
        assert stop.value.finding.code == "F113"
    broken = replace(rows[0], token_advantages=(float("nan"), *rows[0].advantages[1:]))
    with pytest.raises(GuardStop) as stop:
        check_rollout([made], [broken, rows[1]], facts)
    assert stop.value.finding.code == "F118"
    # The loss of the step follows from its tokens, whichever loss it is.
    for loss in ("grpo", "dr_grpo", "luspo", "dapo"):
        value, size = planned_loss(rows, loss, 8)
        share = {"grpo": lambda n: 1 / (2 * n), "dr_grpo": lambda n: 1 / 16, "luspo": lambda n: 1 / 2}.get(
            loss
        )
        weights = [share(len(r.advantages)) if share else 1 / 9 for r in rows]
        sums = [w * a for w, r in zip(weights, rows, strict=True) for a in r.advantages]
        assert (value, size) == pytest.approx((-sum(sums), sum(map(abs, sums))), rel=1e-6)
