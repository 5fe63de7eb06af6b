"""Packing: every row that needs a forward pass gets exactly one a pass, however the step is cut.

A completion token names its row (`first` counts on from group to group), so what a micro-batch trains can be
read off its targets.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.batching.credit import credit_samples, row_credits
from covey.batching.pack import (
    PackPlan,
    _has_signal,
    _row,
    micro_batches,
    pack,
)
from covey.batching.samples import to_samples
from covey.batching.shares import step_slices, steps_of
from covey.errors import GuardStop
from covey.health.guards.batch import check_batches
from covey.token_streams import build_stream
from covey.types import (
    AnnotatedSample,
    Denominators,
    Finish,
    KeptSets,
    Outcome,
    Sample,
    TokenSequence,
    TrainSample,
)
from support.options import credit


def rows_of(groups, *, may_skip: bool = True, mask_truncated: bool = False) -> list[TrainSample]:
    samples = to_samples(groups)
    credits = row_credits(
        groups, samples, credit(scale_rewards="none", mask_truncated_completions=mask_truncated)
    )
    annotated = [
        AnnotatedSample(sample=s, old_logprob_N=torch.tensor(s.sampler_logprobs) - 1.0) for s in samples
    ]
    return credit_samples(annotated, credits, may_skip_rows=may_skip)


def sample_of(group: int, sibling: int, completion: tuple[int, ...]) -> Sample:
    """A sample with a prompt of 3 tokens."""
    own = len(completion)
    return Sample(
        group=group,
        sibling=sibling,
        episode=sibling,
        tokens=TokenSequence.behind(
            3,
            token_ids=(1, 1, 1, *completion),
            is_trained=(False,) * 3 + (True,) * own,
            logprobs=(0.0,) * own,
            versions=((0, own),),
        ),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )


def cut(lengths: list[tuple[int, int]], plan: PackPlan, skip: tuple[int, ...] = ()) -> list[list[int]]:
    """Micro-batches over rows of (group, completion length), with prompts of 3 tokens."""
    samples = [sample_of(group, i, (1,) * own) for i, (group, own) in enumerate(lengths)]
    forward = [i not in skip for i in range(len(samples))]
    (step,) = steps_of(samples, forward, replace(plan, completions_per_rank=len(samples) // plan.world))
    return micro_batches(samples, forward, step, plan, plan.rank)


FOUR = [(0, 2), (0, 4), (1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("stream", "max_tokens", "expected"),
    [
        # packed: 5 + 7 = 12, + 6 = 18, + 6 = 24.
        ("packed", 24, [[0, 1, 2, 3]]),
        ("packed", 23, [[0, 1, 2], [3]]),
        ("packed", 12, [[0, 1], [2, 3]]),
        ("packed", 11, [[0], [1], [2], [3]]),
        # prefix: 5, + 4 = 9, + 6 = 15, + 3 = 18: a prompt counts once.
        ("prefix", 18, [[0, 1, 2, 3]]),
        # Siblings stay together: 9 tokens, and 9.
        ("prefix", 17, [[0, 1], [2, 3]]),
        ("prefix", 9, [[0, 1], [2, 3]]),
        # A prompt that starts a new micro-batch counts again: 5 | 7 | 6, + 3 = 9 > 8 | 6.
        ("prefix", 8, [[0], [1], [2], [3]]),
        # padded: widths 5, 7, 7, 7: 5, 14, 21, 28.
        ("padded", 28, [[0, 1, 2, 3]]),
        ("padded", 27, [[0, 1, 2], [3]]),
        ("padded", 14, [[0, 1], [2, 3]]),
        # A row is never refused, however long.
        ("padded", 1, [[0], [1], [2], [3]]),
        ("prefix", 1, [[0], [1], [2], [3]]),
    ],
)
def test_the_token_budget_by_hand(stream, max_tokens, expected, pack_plan):
    assert cut(FOUR, pack_plan(stream=stream, max_tokens=max_tokens)) == expected


def test_rows_without_a_forward_pass_take_no_room(pack_plan):
    assert cut(FOUR, pack_plan(stream="packed", max_tokens=12), skip=(1,)) == [[0, 2], [3]]
    # Their prompt is not in the stream either: row 1 brings it itself, 7 and not 4.
    assert cut(FOUR, pack_plan(stream="prefix", max_tokens=7), skip=(0, 2)) == [[1], [3]]
    assert cut(FOUR, pack_plan(), skip=(0, 1, 2, 3)) == []


def cut_completions(rows: list[tuple[int, tuple[int, ...]]], plan: PackPlan) -> list[list[int]]:
    """Micro-batches over rows of (group, completion)."""
    samples = [sample_of(group, i, completion) for i, (group, completion) in enumerate(rows)]
    plan = replace(plan, completions_per_rank=len(samples))
    everything = [True] * len(samples)
    (step,) = steps_of(samples, everything, plan)
    return micro_batches(samples, everything, step, plan, plan.rank)


@pytest.mark.parametrize(
    ("stream", "max_tokens", "expected"),
    [
        # 3 + 4 tokens, + 4 of each sibling; another group's 5.
        ("prefix", 24, [[0, 1, 2, 3, 4]]),
        ("prefix", 23, [[0, 1, 2, 3], [4]]),
        ("prefix", 15, [[0, 1, 2], [3, 4]]),
        ("prefix", 6, [[0], [1], [2], [3], [4]]),
        # Packed rows share nothing: 7 tokens each, and 5.
        ("packed", 14, [[0, 1], [2, 3], [4]]),
    ],
)
def test_the_prompt_of_siblings_counts_once(stream, max_tokens, expected, pack_plan):
    rows = [(0, (5, 6, 7, 8)), (0, (5, 6, 9, 9)), (0, (5, 6, 7, 8)), (0, (5, 6, 7, 4)), (1, (5, 6))]
    assert cut_completions(rows, pack_plan(stream=stream, max_tokens=max_tokens)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_is_filled_and_siblings_stay_together(seed, pack_plan):
    draw = random.Random(seed)
    drawn = [tuple(draw.choices((5, 6), k=draw.randint(1, 9))) for _ in range(draw.choice((8, 24)))]
    rows = [(i // 8, completion) for i, completion in enumerate(drawn)]
    plan = pack_plan(stream="prefix", max_tokens=draw.choice((15, 30, 60)))
    found = cut_completions(rows, plan)
    assert [i for numbers in found for i in numbers] == list(range(len(rows)))

    def held(numbers: list[int]) -> int:
        """Every completion, and the 3 tokens of each group's prompt once."""
        return sum(len(rows[i][1]) for i in numbers) + 3 * len({rows[i][0] for i in numbers})

    for numbers, following in zip(found, [*found[1:], []], strict=True):
        stream = build_stream([_row(sample_of(rows[i][0], i, rows[i][1])) for i in numbers], "prefix")
        assert stream.tokens_T.numel() <= held(numbers) <= plan.max_tokens
        if not following:
            continue
        group = [i for i in range(len(rows)) if rows[i][0] == rows[following[0]][0]]
        if held(group) <= plan.max_tokens:
            assert set(group) <= set(following)
            assert held([*numbers, *group]) > plan.max_tokens
        elif set(group) & set(numbers):
            assert held([*numbers, following[0]]) > plan.max_tokens
            assert numbers[0] in group


def linked(batch) -> list[tuple[bool, bool] | None]:
    return [m.shared and (m.shared.follows, m.shared.is_followed) for m in batch.micro_batches]


def test_passes_that_begin_with_one_prompt_know_of_each_other(scored_group, pack_plan):
    """Three of 4 + 4 tokens, the last with another group behind it, which fits; and a group of two passes."""
    groups = [
        scored_group([1.0, 0.0, 0.5], prompt=[9, 8, 7, 6], lengths=[4] * 3, first=100),
        scored_group([1.0], prompt=[9, 8], lengths=[1], first=200),
        scored_group([1.0, 0.0], prompt=[5, 4, 3, 2, 1, 0], lengths=[3, 3], first=300),
    ]
    rows = rows_of(groups, may_skip=False)
    plan = pack_plan(completions_per_rank=6, max_tokens=11)
    (batch,) = pack(rows, plan, rollout=0)
    assert linked(batch) == [(False, True), (True, True), (True, False), (False, True), (True, False)]
    assert batch.micro_batches[2].tokens_T[:4].tolist() == [9, 8, 7, 6]
    assert batch.micro_batches[2].tokens_T.tolist()[-2:] == [9, 8]
    for stream in ("packed", "padded"):
        (batch,) = pack(rows, replace(plan, stream=stream), rollout=0)
        assert set(linked(batch)) == {None}
    (batch,) = pack(rows, replace(plan, max_tokens=100), rollout=0)
    assert linked(batch) == [None]


@pytest.mark.parametrize("by_token", [False, True])
def test_first_tokens_are_no_signal_where_another_pass_has_their_gradient(by_token, scored_group, pack_plan):
    """Of three passes over a prompt; the share of entropies leaves one of them its first token alone."""
    group = scored_group([1.0, 0.0, 0.5], prompt=[9, 8, 7, 6], lengths=[1, 4, 4])
    rows = rows_of([group], may_skip=False)
    entropies = [[9.0], [9.0, 1.0, 1.0, 1.0], [9.0, 9.0, 1.0, 1.0]]
    rows = [
        replace(
            row,
            token_advantages=(0.5,) * len(entropy) if by_token else None,
            annotated=replace(row.annotated, entropy_N=torch.tensor(entropy)),
        )
        for row, entropy in zip(rows, entropies, strict=True)
    ]

    def signal(share: float, **changes) -> tuple[bool, ...]:
        plan = pack_plan(completions_per_rank=3, max_tokens=7, top_entropy_quantile=share, **changes)
        return pack([*rows], plan, rollout=0)[0].has_signal

    assert signal(1.0) == (False, True, by_token)
    assert signal(0.4) == (False, False, by_token)
    assert signal(0.4, stream="packed") == (True, True, by_token)


def test_steps_are_equal_runs_over_all_ranks(pack_plan):
    plan = pack_plan(world=2, completions_per_rank=2, max_tokens=1000)
    samples = [sample_of(0, i, (5,)) for i in range(8)]
    assert step_slices(samples, plan) == [range(0, 4), range(4, 8)]
    with pytest.raises(AssertionError, match="whole number"):
        step_slices(samples[:6], plan)


def test_steps_are_whole_episodes_and_their_rows_are_dealt_by_tokens(pack_plan):
    plan = pack_plan(world=2, completions_per_rank=1)
    rows = [(0, 3), (1, 1), (2, 1), (3, 2)]  # episode, its rows
    samples = [replace(sample_of(0, e, (5,)), episode=e) for e, num in rows for _ in range(num)]
    assert step_slices(samples, plan) == [range(0, 4), range(4, 7)]
    # Rows of 4 tokens, of which 3 are a prompt of each rank's first rows: two rows each, and two and one.
    shares = [[step.of_rank(r) for r in (0, 1)] for step in steps_of(samples, [True] * 7, plan)]
    assert [sorted(map(len, step)) for step in shares] == [[2, 2], [1, 2]]
    assert [sorted([*one, *two]) for one, two in shares] == [[0, 1, 2, 3], [4, 5, 6]]
    # A row without gradient stays where it is, and the others are dealt without it.
    forward = [True, True, False, True, True, False, False]
    shares = [[step.of_rank(r) for r in (0, 1)] for step in steps_of(samples, forward, plan)]
    assert 2 in shares[0][0] and {5, 6} <= {*shares[1][1]}
    with pytest.raises(AssertionError, match="stand together"):
        step_slices([*samples[1:], samples[0]], plan)


@pytest.mark.parametrize("stream", ["padded", "packed", "prefix"])
def test_rows_know_the_tokens_of_their_episode_wherever_they_are_forwarded(stream, scored_group, pack_plan):
    """Episodes of 4 + 2 + 1 and 3 tokens on one rank, in passes of a row each, and of 5 and 2 masked ones."""
    rows = rows_of([scored_group([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], lengths=[4, 2, 1, 3, 5, 2])], may_skip=False)
    episodes = (0, 0, 0, 1, 2, 3)

    def numbered(row: TrainSample, episode: int) -> TrainSample:
        sample = replace(row.annotated.sample, episode=episode)
        return replace(row, annotated=replace(row.annotated, sample=sample))

    rows = [numbered(row, episode) for row, episode in zip(rows, episodes, strict=True)]
    rows[5] = replace(rows[5], loss_mask=(False, False), masked="truncated", needs_forward=False)
    plans = [pack_plan(world=2, rank=r, completions_per_rank=2, max_tokens=1, stream=stream) for r in (0, 1)]
    (first,), (second,) = (pack(rows, plan, rollout=0) for plan in plans)
    micros = [micro for batch in (first, second) for micro in batch.micro_batches]
    counts = [(*m.trained_count_S.tolist(), *m.episode_count_S.tolist()) for m in micros]
    assert sorted(c for c in counts if c[0]) == [(1, 7), (2, 7), (3, 3), (4, 7), (5, 5)]
    assert {m.episode_count_S.dtype for m in first.micro_batches} == {torch.int64}
    expected = Denominators(num_episodes=4, num_tokens=15, max_completion_length=8)
    assert first.denominators == second.denominators == expected
    (whole,) = pack(rows, pack_plan(completions_per_rank=4, stream=stream), rollout=0)
    (micro,) = whole.micro_batches
    assert micro.episode_count_S.tolist() == [7, 7, 7, 3, 5]
    for plan, batch in zip(plans, (first, second), strict=True):
        check_batches([batch], rows, plan, 1)
        wrong = [replace(m, episode_count_S=m.episode_count_S + 1) for m in batch.micro_batches]
        with pytest.raises(GuardStop, match="whole completion") as stop:
            check_batches([replace(batch, micro_batches=tuple(wrong))], rows, plan, 1)
        assert stop.value.finding.code == "F111"
    as_rows = replace(first, denominators=replace(expected, num_episodes=6))
    with pytest.raises(GuardStop, match="6 completions") as stop:
        check_batches([as_rows], rows, plans[0], 1)
    assert stop.value.finding.code == "F111"


@pytest.mark.parametrize("by_token", [False, True])
def test_equal_rows_that_cancel_by_their_episodes_are_no_signal(by_token, scored_group):
    """Advantages 1 and -2 in episodes of 5 and 10 tokens: a loss that weighs an episode by its tokens has no
    gradient there, and one that weighs all tokens the same has."""
    rows = rows_of([scored_group([1.0, 0.0], lengths=[4, 4])])
    same = replace(rows[1].annotated.sample, tokens=rows[0].annotated.sample.tokens)
    rows[1] = replace(rows[1], annotated=replace(rows[1].annotated, sample=same))
    rows = [
        replace(row, advantage=advantage, token_advantages=(advantage,) * 4 if by_token else None)
        for row, advantage in zip(rows, (1.0, -2.0), strict=True)
    ]
    assert not _has_signal(rows, None, False, {0: 5, 1: 10})
    assert _has_signal(rows, None, False, {0: 5, 1: 5})


@pytest.mark.parametrize("by_token", [False, True])
def test_tokens_that_filters_left_alone_are_no_signal(by_token, scored_group, pack_plan):
    def signal(*counts: int) -> tuple[bool, ...]:
        rows = rows_of([scored_group([1.0, 0.0], lengths=[2, 2])])
        ids = [list(range(100, 100 + count)) for count in counts]

        def kept(row: TrainSample, sets: list[list[int]]) -> TrainSample:
            tokens = replace(row.annotated.sample.tokens, kept=KeptSets.of(sets, 300))
            sample = replace(row.annotated.sample, tokens=tokens)
            advantages = (row.advantage,) * 2 if by_token else None
            annotated = replace(row.annotated, sample=sample)
            return replace(row, annotated=annotated, token_advantages=advantages)

        rows = [kept(rows[0], ids[:2]), kept(rows[1], ids[2:])]
        (batch,) = pack(rows, pack_plan(completions_per_rank=2), rollout=0)
        check_batches([batch], rows, pack_plan(completions_per_rank=2), 1)
        return batch.has_signal

    assert signal(1, 1, 1, 1) == (False,)
    assert signal(1, 1, 1, 2) == (True,)
    assert signal(3, 1, 1, 1) == (True,)


def test_sets_of_other_tokens_are_named(scored_group, pack_plan):
    plan = pack_plan(completions_per_rank=2)
    rows = rows_of([scored_group([1.0, 0.0], lengths=[2, 2])])
    sets = KeptSets.of([[100, 101], [101]], 300)
    tokens = replace(rows[0].annotated.sample.tokens, kept=sets)
    sample = replace(rows[0].annotated.sample, tokens=tokens)
    rows[0] = replace(rows[0], annotated=replace(rows[0].annotated, sample=sample))
    (batch,) = pack(rows, plan, rollout=0)
    (micro,) = batch.micro_batches
    assert micro.kept is not None and micro.kept.count_N.tolist() == [2, 1, 0, 0]
    check_batches([batch], rows, plan, 1)
    swapped = replace(micro.kept, words_K=micro.kept.words_K.flip(0))
    for planted in (None, swapped, replace(micro.kept, count_N=micro.kept.count_N.flip(0))):
        wrong = replace(batch, micro_batches=(replace(micro, kept=planted),))
        with pytest.raises(GuardStop, match="what top_p, top_k and min_p kept") as stop:
            check_batches([wrong], rows, plan, 1)
        assert stop.value.finding.code == "F110"


def test_a_micro_batch_written_out(scored_group, pack_plan):
    groups = [scored_group([1.0, 0.0], prompt=[9, 8], lengths=[2, 1], first=100)]
    (batch,) = pack(rows_of(groups), pack_plan(completions_per_rank=2), rollout=7)
    (micro,) = batch.micro_batches
    assert micro.tokens_T.tolist() == [9, 8, 100]
    assert (micro.context_U.tolist(), micro.context_N.tolist()) == ([1, 2], [0, 1, 0])
    assert micro.target_N.tolist() == [100, 101, 102]
    assert micro.sequence_N.tolist() == [0, 0, 1]
    assert micro.advantage_N.tolist() == [0.5, 0.5, -0.5]
    assert micro.temperature_N.tolist() == pytest.approx([0.7] * 3)
    assert micro.sampler_logprob_N.tolist() == pytest.approx([-100 / 1024, -101 / 1024, -102 / 1024])
    assert micro.old_logprob_N.tolist() == pytest.approx([-1 - 100 / 1024, -1 - 101 / 1024, -1 - 102 / 1024])
    assert micro.ref_logprob_N is None
    assert micro.trained_count_S.tolist() == [2, 1]
    floats = ("advantage_N", "temperature_N", "sampler_logprob_N", "old_logprob_N")
    assert {getattr(micro, name).dtype for name in floats} == {torch.float32}
    assert (batch.rollout, batch.pass_index, batch.dropped) == (7, 0, {})


def test_a_prompt_is_shared_by_rows_of_one_temperature_alone(scored_group, pack_plan):
    (group,) = [scored_group([1.0, 0.0, 0.25], prompt=[9, 8], lengths=[1, 1, 1], first=100)]
    rows = rows_of([group])
    hot = replace(rows[2].annotated.sample, temperature=1.5)
    rows[2] = replace(rows[2], annotated=replace(rows[2].annotated, sample=hot))
    again = replace(rows[1].annotated.sample, episode=3)
    rows.append(replace(rows[1], annotated=replace(rows[1].annotated, sample=again)))
    (batch,) = pack(rows, pack_plan(completions_per_rank=4), rollout=0)
    (micro,) = batch.micro_batches
    assert micro.tokens_T.tolist() == [9, 8, 9, 8]
    assert (micro.context_U.tolist(), micro.context_N.tolist()) == ([1, 3], [0, 0, 1, 0])
    assert micro.temperature_N.tolist() == pytest.approx([0.7, 0.7, 1.5, 0.7])
    # 3 tokens of the first row, 1 more, 3 of the hot one, 1 more: 8, and not 6.
    assert len(pack(rows, pack_plan(completions_per_rank=4, max_tokens=7), rollout=0)[0].micro_batches) == 2
    assert len(pack(rows, pack_plan(completions_per_rank=4, max_tokens=8), rollout=0)[0].micro_batches) == 1


def test_denominators_count_masked_sequences_and_only_unmasked_tokens(scored_group, pack_plan):
    groups = [
        scored_group([1.0, 0.0, "error", 1.0], lengths=[2, 3, 4, 5], finishes={3: Finish.LENGTH}),
        scored_group([1.0] * 4, lengths=[1, 1, 1, 2]),
    ]
    rows = rows_of(groups, mask_truncated=True)
    for world in (1, 2, 4):
        per_rank = 8 // world
        for rank in range(world):
            plan = pack_plan(world=world, rank=rank, completions_per_rank=per_rank)
            (batch,) = pack(rows, plan, rollout=0)
            # Sequences: all 8. Tokens: 2 + 3 of the first group, and the second's 5, whose gradient is 0
            # but which are in the loss.
            assert batch.denominators == Denominators(num_episodes=8, num_tokens=10, max_completion_length=8)
            assert batch.dropped == {"invalid": 1, "truncated": 1, "zero_advantage": 4}


def test_denominators_are_each_steps_own(scored_group, pack_plan):
    groups = [scored_group([1.0, 0.0], lengths=[2, 3]), scored_group([1.0, None], lengths=[4, 8])]
    batches = pack(rows_of(groups), pack_plan(completions_per_rank=2), rollout=0)
    assert [b.denominators.num_tokens for b in batches] == [5, 4]
    assert [b.denominators.num_episodes for b in batches] == [2, 2]


def test_a_rank_with_fewer_rows_joins_with_empty_micro_batches(scored_group, pack_plan):
    # Three rows of 7 tokens for two ranks; the fourth has no advantage.
    rows = rows_of([scored_group([1.0, 0.0, 0.25], lengths=[5, 5, 5]), scored_group([1.0])])
    plans = [pack_plan(world=2, rank=r, completions_per_rank=2, max_tokens=7) for r in (0, 1)]
    (first,), (second,) = (pack(rows, p, rollout=0) for p in plans)
    assert len(first.micro_batches) == len(second.micro_batches) == 2
    empty = [m for batch in (first, second) for m in batch.micro_batches if not m.target_N.numel()]
    (micro,) = empty
    assert micro.context_U.numel() == micro.context_N.numel() == micro.advantage_N.numel() == 0
    assert micro.tokens_T.numel() == 1
    assert micro.trained_count_S.tolist() == [0]


def test_a_step_without_any_row_still_has_a_micro_batch(scored_group, pack_plan):
    (batch,) = pack(rows_of([scored_group([1.0, 1.0])]), pack_plan(completions_per_rank=2), rollout=0)
    assert [m.target_N.numel() for m in batch.micro_batches] == [0]


def test_annotations_are_all_or_none(scored_group, pack_plan):
    rows = rows_of([scored_group([1.0, 0.0])])
    bare = replace(rows[0], annotated=AnnotatedSample(sample=rows[0].annotated.sample))
    with pytest.raises(AssertionError, match="annotated"):
        pack([bare, rows[1]], pack_plan(completions_per_rank=2), rollout=0)


# -- property ----------------------------------------------------------------------------------------------


@st.composite
def cuts(draw) -> dict[str, int | str | bool]:
    world, per_rank = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 6))
    return {
        "world": world,
        "completions_per_rank": per_rank,
        "steps": draw(st.integers(1, 3)),
        "num_iterations": draw(st.integers(1, 2)),
        "max_tokens": draw(st.integers(1, 60)),
        "stream": draw(st.sampled_from(["padded", "packed", "prefix"])),
        "siblings": draw(st.integers(1, 5)),
        "may_skip": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cut=cuts())
def test_every_row_once_a_pass_whatever_the_cut(cut, scored_group, pack_plan):
    rng = random.Random(cut["seed"])
    per_step = cut["world"] * cut["completions_per_rank"]
    total, groups, first = per_step * cut["steps"], [], 100
    while total:  # the last group may be smaller: only the number of rows matters to packing
        size = min(cut["siblings"], total)
        lengths = [rng.randint(1, 7) for _ in range(size)]
        totals = [rng.choice([0.0, 1.0, 1.0, None, "error"]) for _ in range(size)]
        groups.append(scored_group(totals, lengths=lengths, first=first, prompt=range(1, rng.randint(2, 6))))
        first, total = first + sum(lengths), total - size
    rows = rows_of(groups, may_skip=cut["may_skip"])
    row_of = {t: i for i, r in enumerate(rows) for t in r.annotated.sample.token_ids if t >= 100}
    names = ("world", "completions_per_rank", "num_iterations", "max_tokens", "stream")
    plans = [pack_plan(rank=r, **{n: cut[n] for n in names}) for r in range(cut["world"])]
    per_rank = [pack(rows, plan, rollout=0) for plan in plans]

    assert {len(batches) for batches in per_rank} == {cut["steps"] * cut["num_iterations"]}
    for number, batches in enumerate(zip(*per_rank, strict=True)):
        index, step = divmod(number, cut["steps"])
        wanted = [i for i in range(step * per_step, (step + 1) * per_step) if rows[i].needs_forward]
        assert {b.pass_index for b in batches} == {index}
        # Every collective of a backward pass has all ranks in it, and every rank divides by the same numbers.
        assert len({len(b.micro_batches) for b in batches}) == 1
        assert len({b.denominators for b in batches}) == 1
        found = [trained_rows(m, row_of, rows, cut) for b in batches for m in b.micro_batches]
        # Each row once, in a rank's passes in sample order.
        assert sorted(i for part in found for i in part) == wanted
        for batch in batches:
            own = [i for m in batch.micro_batches for i in trained_rows(m, row_of, rows, cut)]
            assert own == sorted(own)
        dropped = Counter(
            rows[i].masked or "zero_advantage" for i in step_rows(step, per_step) if i not in wanted
        )
        assert all(b.dropped == dropped for b in batches)


def step_rows(step: int, per_step: int) -> range:
    return range(step * per_step, (step + 1) * per_step)


def trained_rows(micro, row_of, rows, cut) -> list[int]:
    """The rows that a micro-batch trains, each checked to be there whole and within the token budget."""
    found = list(dict.fromkeys(row_of[t] for t in micro.target_N.tolist()))
    samples = [rows[i].annotated.sample for i in found]
    assert micro.target_N.tolist() == [t for s in samples for t in s.token_ids[s.prompt_length :]]
    assert micro.sampler_logprob_N.tolist() == pytest.approx([x for s in samples for x in s.sampler_logprobs])
    counts = [len(s.sampler_logprobs) for s in samples]
    assert micro.trained_count_S.tolist() == (counts or [0])
    expected = [rows[i].advantage for i, n in zip(found, counts, strict=True) for _ in range(n)]
    assert micro.advantage_N.tolist() == pytest.approx(expected)
    assert micro.tokens_T.numel() <= cut["max_tokens"] or len(found) <= 1
    return found
