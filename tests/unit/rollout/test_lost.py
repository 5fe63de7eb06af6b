"""An engine that is lost in the middle of a rollout: what has come back counts, the rest has no reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from covey.batching.credit import row_credits
from covey.batching.samples import to_samples
from covey.comm import Comm, LocalComm
from covey.data.rows import prompt_table
from covey.data.text import TextCodec
from covey.errors import EngineLost
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rewards.protocol import Scored
from covey.rewards.registry import build, score_rows
from covey.rollout.collect import collect
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan
from covey.texts import packed, tr
from covey.types import Completion, Episode, Finding, Origin, Outcome, SamplingParams, Score, ScoredGroup
from support.options import credit
from support.rollout_shares import on_counting_ranks

GONE = tr("no rollout server is left")
NUM_PROMPTS, SIBLINGS = 3, 4


class Lost(NativeEngine):
    """Is gone after so many completions."""

    num_left: int

    def results(self) -> Iterator[Completion]:
        for number, completion in enumerate(super().results()):
            if number == self.num_left:
                break
            yield completion
        raise EngineLost(Finding(code="F140", seen=GONE, why="", cause=""))


Collected = tuple[list[ScoredGroup], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def collected(quickstart_policy: Policy, quickstart_codec: TextCodec) -> Callable[..., Collected]:
    """The groups of a rollout whose engine gives `num_left` completions (None: all), and which of them the
    rewards were asked about."""
    table = prompt_table(task.training_rows()[:NUM_PROMPTS], quickstart_codec, max_length=None)
    prompts = [table.take(i, Origin(epoch=0, rollout=0)) for i in range(NUM_PROMPTS)]
    stop = quickstart_codec.stop_token_ids
    plan = CollectPlan(
        num_generations=SIBLINGS,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=16, stop_token_ids=stop),
        seed=5,
        weights={"accuracy": 1.0, "format": 0.5},
    )

    def run(comm: Comm, num_left: int | None) -> Collected:
        engine = NativeEngine(quickstart_policy)
        if num_left is not None:
            engine = Lost(quickstart_policy)
            engine.num_left = num_left
        asked: list[tuple[int, int]] = []

        def score(rows: Sequence[Scored]) -> Callable[[], list[Score]]:
            asked.extend((row.prompt.id, row.episode.id.sibling) for row in rows)
            return lambda: score_rows(build(["accuracy", "format"]), [1.0, 0.5], rows)

        return list(collect(prompts, engine, score, quickstart_codec, plan, comm).groups), asked

    return run


def members(groups: Sequence[ScoredGroup]) -> list[tuple[Episode, Score]]:
    return [pair for g in groups for pair in zip(g.group.episodes, g.scores, strict=True)]


@pytest.mark.parametrize("num_left", [0, 1, 5, 11, 12])
def test_what_came_back_counts_and_the_rest_has_no_reward(
    num_left: int, collected: Callable[..., Collected]
) -> None:
    groups, asked = collected(LocalComm(), num_left)
    whole, _ = collected(LocalComm(), None)
    lost = [(e.id.prompt_id, e.id.sibling) for e, _ in members(groups) if e.failure]
    assert len(lost) == NUM_PROMPTS * SIBLINGS - num_left and len(asked) == num_left
    assert not set(lost) & set(asked)
    for (ours, score), (theirs, expected) in zip(members(groups), members(whole), strict=True):
        if ours.failure:
            assert (ours.id, ours.outcome, ours.sequences) == (theirs.id, Outcome.INFRASTRUCTURE, ())
            assert ours.failure == GONE and score.total is None
            assert [(p.name, p.value) for p in score.parts] == [("accuracy", None), ("format", None)]
        else:
            assert ours.sequences == theirs.sequences and score == expected


@pytest.mark.parametrize("num_left", [0, 1, 5, 11])
def test_rows_of_lost_completions_are_in_no_statistic(
    num_left: int, collected: Callable[..., Collected]
) -> None:
    groups, _ = collected(LocalComm(), num_left)
    samples = to_samples(groups)
    assert len(samples) == NUM_PROMPTS * SIBLINGS
    credits = row_credits(groups, samples, credit())
    for number, scored in enumerate(groups):
        own = credits[number * SIBLINGS : (number + 1) * SIBLINGS]
        here = [e.outcome is not Outcome.INFRASTRUCTURE for e in scored.group.episodes]
        # One that is left alone has nothing to be compared with.
        is_left = [h and sum(here) > 1 for h in here]
        assert [credit.masked == "infrastructure" for credit in own] == [not left for left in is_left]
        assert all(left or credit.advantage == 0.0 for left, credit in zip(is_left, own, strict=True))
        assert sum(credit.advantage for credit in own) == pytest.approx(0.0, abs=1e-5)


def test_every_rank_knows_what_one_has_lost_and_why(collected: Callable[..., Collected]) -> None:
    results, _ = on_counting_ranks(2, lambda comm: collected(comm, 2 if comm.rank else None)[0])
    for groups in results:
        failures = [e.failure for e, _ in members(groups)]
        assert failures.count("") == 8 and failures[:6] == [""] * 6
        # With its template, so that people read it in their language.
        assert all(packed(failure) == packed(GONE) for failure in failures if failure)
        assert all(score.total is None for e, score in members(groups) if e.failure)
