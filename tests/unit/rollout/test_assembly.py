"""A rollout of many ranks, from what each has collected to the rows that each forwards.

Ranks are threads over a communicator that counts bytes; what they run is what a run runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.batching.samples import to_samples
from covey.batching.shares import PackPlan, steps_of
from covey.comm import LocalComm
from covey.learner.annotate import at_their_ranks
from covey.rewards.registry import total
from covey.rollout.assembly import RankShare, assemble
from covey.rollout.exchange import SUMMARY
from covey.rollout.slots import CollectPlan, Slot, slots_of
from covey.types import (
    Episode,
    Outcome,
    Sample,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Status,
    TokenSequence,
)
from support.groups import prompt
from support.rollout_shares import CountingComm, on_counting_ranks

WEIGHTS = {"right": 1.0, "form": 0.25, "lines": 0.5}
SAMPLING = SamplingParams(temperature=0.9, max_new_tokens=4096, stop_token_ids=(1,))


class Codec:
    """Knows every id below 1,000."""

    def num_unknown(self, ids: list[int]) -> int:
        return sum(i >= 1000 for i in ids)


def plan(siblings: int) -> CollectPlan:
    return CollectPlan(num_generations=siblings, sampling=SAMPLING, seed=5, weights=WEIGHTS)


def sequence(draw: np.random.Generator, asked: tuple[int, ...], mean_length: int) -> TokenSequence:
    num = 1 + int(mean_length * np.exp(draw.normal(-0.2, 0.6)))
    return TokenSequence.behind(
        len(asked),
        token_ids=[*asked, *draw.integers(0, 1010, num).tolist()],
        is_trained=[False] * len(asked) + [True] * num,
        logprobs=draw.normal(-1.0, 0.3, num).astype(np.float32),
        versions=((3, num // 2), (4, num - num // 2)) if num > 1 else ((4, 1),),
    )


def made(slot: Slot, how: CollectPlan, mean_length: int) -> tuple[Episode, Score]:
    """The same episode and score for the same slot on whatever rank: one of 23 has lost its server, one of 7
    has two sequences, one of 5 a reward of steps, one of 11 a reward that failed."""
    n, draw = slot.number, np.random.default_rng(slot.number)
    asked = tuple(slot.prompt.token_ids)
    is_lost = n % 23 == 22
    sequences = [] if is_lost else [sequence(draw, asked, mean_length) for _ in range(2 if n % 7 == 6 else 1)]
    parts = [
        ScorePart(name="right", value=float(n % 2)),
        ScorePart(name="form", value=None if n % 3 else 0.5),
        ScorePart(name="lines", value=0.5, steps=(1.0, 0.0) if n % 5 == 4 else None),
    ]
    if n % 11 == 10:
        parts[1] = ScorePart(name="form", value=None, status=Status.ERROR, message=f"no form in {n}")
    ends = (1, sum(s.num_trained for s in sequences))
    score = replace(total(parts, list(WEIGHTS.values()), ends), extras={"parsed_by": "none"} if n % 4 else {})
    episode = Episode(
        id=slot.episode_id,
        sequences=tuple(sequences),
        outcome=Outcome.INFRASTRUCTURE if is_lost else Outcome.SCORED,
        text=f"text {n}",
        sampling=SAMPLING,
        failure="the server is gone" if is_lost else "",
    )
    return episode, score


def share(slots: list[Slot], how: CollectPlan, mean_length: int) -> RankShare:
    pairs = [made(slot, how, mean_length) for slot in slots]
    return RankShare(slots=slots, episodes=[e for e, _ in pairs], scores=[s for _, s in pairs])


def rank_of(slot: Slot, num: int, world: int) -> int:
    """Uneven shares: the first rank has collected a third, the last one nothing."""
    at = slot.number / num
    return 0 if at < 1 / 3 else 1 + int((at - 1 / 3) * 1.5 * (world - 2)) if world > 2 else int(at > 0.6)


def rollout(
    comm: Any, prompts: int, siblings: int, mean_length: int
) -> tuple[list[ScoredGroup], list[Sample], Any]:
    """What one rank has at the end: groups, rows where they are forwarded, and the steps."""
    how = plan(siblings)
    slots = slots_of([prompt(n) for n in range(prompts)], how)
    own = [s for s in slots if rank_of(s, len(slots), comm.world) == comm.rank] if comm.world > 1 else slots
    groups = assemble(slots, share(own, how, mean_length), Codec(), how, comm)  # type: ignore[arg-type]
    samples = to_samples(groups)
    dealt = PackPlan(
        rank=comm.rank,
        world=comm.world,
        completions_per_rank=prompts * siblings // comm.world,
        num_iterations=1,
        max_tokens=10_000,
        max_completion_length=4096,
        stream="packed",
        device=torch.device("cpu"),
    )
    steps = steps_of(samples, [s.num_trained > 0 for s in samples], dealt)
    return groups, at_their_ranks(samples, steps, comm), steps


def test_every_rank_knows_what_one_process_has() -> None:
    alone, every, _ = rollout(LocalComm(), 12, 4, 30)
    results, _ = on_counting_ranks(3, lambda comm: rollout(comm, 12, 4, 30))
    for rank, (groups, _, _) in enumerate(results):
        for ours, theirs in zip(groups, alone, strict=True):
            assert ours.group.prompt == theirs.group.prompt and ours.group.lost == theirs.group.lost
            for e, expected in zip(ours.group.episodes, theirs.group.episodes, strict=True):
                assert (e.id, e.outcome, e.failure) == (expected.id, expected.outcome, expected.failure)
                assert e.versions == expected.versions and e.num_trained == expected.num_trained
                assert e.text == (expected.text if e.owner == rank else "")
            for score, expected_score in zip(ours.scores, theirs.scores, strict=True):
                assert score == expected_score
    known = [replace(s.summary, num_unknown=0, is_repetitive=False) for s in every]
    forwarded: dict[int, TokenSequence] = {}
    for _, samples, _ in results:
        assert [replace(s.summary, num_unknown=0, is_repetitive=False) for s in samples] == known
        held = {i: s.tokens for i, s in enumerate(samples) if s.is_held and s.num_trained}
        assert not held.keys() & forwarded.keys()
        forwarded |= held
    assert forwarded == {i: s.tokens for i, s in enumerate(every) if s.num_trained}


@pytest.mark.parametrize("world", [2, 16])
def test_bytes_and_loads_of_ranks(world: int) -> None:
    """At most 100 bytes a row and 8 a part to each rank, but for the few words about failures; a row that
    moves goes once, to the rank that forwards it; the slowest rank has at most 1.1 times the mean."""
    results, shared = on_counting_ranks(world, lambda comm: rollout(comm, 4 * world, 8, 200))
    samples = results[0][1]
    assert SUMMARY.itemsize + 9 * len(WEIGHTS) <= 100 + 8 * len(WEIGHTS)
    owned = np.zeros(world, np.int64)
    for sample in samples:
        owned[sample.owner or 0] += 1
    # The records, and for one of five the numbers and ends of its steps.
    assert (
        shared.sent["gather_tensors"] <= (1 + owned[:, None]) * (100 + 8 * len(WEIGHTS)) + 40 * owned[:, None]
    ).all()
    moved = np.zeros((world, world), np.int64)
    ranks = np.concatenate([step.assignment.rank_of_R for step in results[0][2]])
    for sample, rank in zip(samples, ranks.tolist(), strict=True):
        if sample.owner is not None and sample.owner != rank:
            moved[sample.owner, rank] += (
                17 + 4 * (sample.length + sample.num_trained) + sample.length // 8 + 2 * 12
            )
    sent = shared.sent["swap_tensors"]
    assert (sent <= moved + 24 * (moved > 0)).all() and (sent[moved > 0] > 0.9 * moved[moved > 0]).all()
    loads = [sum(s.length for s in mine if s.is_held and s.num_trained) for _, mine, _ in results]
    assert max(loads) <= 1.1 * np.mean(loads)


def test_a_rank_that_opens_the_tokens_of_another_fails() -> None:
    def work(comm: CountingComm) -> list[int]:
        groups, _, _ = rollout(comm, 6, 4, 20)
        return [i for g in groups for e in g.group.episodes for i in e.completion_ids]

    results, _ = on_counting_ranks(2, work)
    assert all(isinstance(found, AssertionError) and "another rank" in str(found) for found in results)
