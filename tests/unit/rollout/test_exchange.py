"""The exchange: every rank has the records of all, rows are where they are forwarded, and what contradicts
itself is named on every rank.

Gloo processes run exchange_ranks.py; ranks that are threads run the same code and count bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.batching.assignment import assign
from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.rollout.exchange import SUMMARY, Summaries, exchange
from covey.rollout.moving import move
from covey.types import KeptSets, TokenSequence
from covey.types.episode import summary_of
from support.processes import run_in_processes
from support.rollout_shares import (
    NUM_PARTS,
    CountingComm,
    MadeRollout,
    made_rollout,
    on_counting_ranks,
    same_summaries,
)

PROGRAM = str(Path(__file__).with_name("exchange_ranks.py"))
EPISODES = 24


def test_processes_have_what_one_process_has() -> None:
    run_in_processes(PROGRAM, "same", processes=3)


def test_processes_name_the_same_fault() -> None:
    run_in_processes(PROGRAM, "named", processes=3)


@pytest.mark.parametrize("collective", ["swap", "gather"])
def test_a_rank_that_leaves_in_the_middle_ends_the_others(collective: str) -> None:
    run_in_processes(PROGRAM, "leaves", processes=3, environment={"LEAVES_IN": collective})


def made(**changes: Any) -> MadeRollout:
    """24 episodes in groups of 4, on 3 ranks."""
    return made_rollout(6, 4, lambda episode: episode * 7 % 3, **changes)


def test_one_process_keeps_its_rows() -> None:
    alone = made_rollout(6, 4, lambda _: 0, several=0.5, failed=0.2, steps=0.3)
    everyone = exchange(alone.share(0), EPISODES, LocalComm())
    assert same_summaries(everyone, alone.summaries)
    has_tokens = np.flatnonzero(everyone.rows["length"]).tolist()
    here = np.zeros(len(everyone.rows), np.int64)
    mine = move(alone.held(0), alone.known, here, here, LocalComm())
    assert list(mine) == has_tokens
    assert all(mine[n] is alone.tokens[n] for n in has_tokens)


def test_a_record_is_at_most_100_bytes_with_eight_of_each_part() -> None:
    assert SUMMARY.itemsize + 9 * NUM_PARTS <= 100 + 8 * NUM_PARTS


def test_bytes_go_where_they_have_to() -> None:
    """Records to every rank, each moved row from its owner to its rank, nothing else, nothing twice."""
    rollout = made_rollout(64, 16, lambda episode: min(15, episode // 50), mean_length=300)
    world, rows = 16, rollout.summaries.rows
    held = [rollout.held(rank) for rank in range(world)]

    def work(comm: CountingComm) -> tuple[Any, dict[int, TokenSequence]]:
        everyone = exchange(rollout.share(comm.rank), 64 * 16, comm)
        known = [everyone.known(number) for number in range(len(everyone.rows))]
        dealt = assign(everyone.rows["length"], rollout.group_R, rollout.owner_R, world)
        return dealt, move(held[comm.rank], known, rollout.owner_R, dealt.rank_of_R, comm)

    results, shared = on_counting_ranks(world, work)
    rank_of = results[0][0].rank_of_R
    assert all((dealt.rank_of_R == rank_of).all() for dealt, _ in results)
    assert results[0][0].unevenness <= 1.1
    records = np.bincount(rows["owner"], minlength=world) * (100 + 8 * NUM_PARTS)
    sent = shared.sent["gather_tensors"]
    assert (sent <= records[:, None]).all() and (sent.sum(0) > 0).all()
    # A row: 16 bytes of sizes, ids, a bit and 4 bytes a trained token for its logprob, runs.
    expected = np.zeros((world, world), np.int64)
    for number, row in enumerate(rollout.tokens):
        own, to = int(rows["owner"][number]), int(rank_of[number])
        if own != to:
            expected[own, to] += 16 + 4 * (row.length + row.num_trained) + 12 * len(row.versions)
    bits = shared.sent["swap_tensors"] - expected
    lengths = np.zeros_like(expected)
    np.add.at(lengths, (rows["owner"], rank_of), rows["length"])
    assert (bits[expected > 0] == 24 + -(-lengths[expected > 0] // 8)).all()
    assert not shared.sent["swap_tensors"][expected == 0].any()
    assert all(set(own.num_read.values()) == {1} for own in held if own.num_read)
    forwarded = sorted(n for _, mine in results for n in mine)
    assert forwarded == list(range(len(rows)))
    for rank, (_, mine) in enumerate(results):
        assert all(rank_of[n] == rank and row == rollout.tokens[n] for n, row in mine.items())


def test_step_rewards_travel_only_where_there_are_some() -> None:
    for steps, times in ((0.0, 1), (0.4, 2)):
        rollout = made(steps=steps, several=0.3)

        def work(comm: CountingComm, rollout: MadeRollout = rollout) -> tuple[bool, int]:
            calls = 0
            gather = comm.gather_tensors

            def counted(own: Any) -> Any:
                nonlocal calls
                calls += 1
                return gather(own)

            comm.gather_tensors = counted  # type: ignore[method-assign]
            return same_summaries(
                exchange(rollout.share(comm.rank), EPISODES, comm), rollout.summaries
            ), calls

        assert on_counting_ranks(3, work)[0] == [(True, times)] * 3


def test_equal_completions_have_equal_digests() -> None:
    def digest(prompt: list[int], *completion: int) -> int:
        ids = [*prompt, *completion]
        is_trained = [False] * len(prompt) + [True] * len(completion)
        return TokenSequence.behind(
            len(prompt), token_ids=ids, is_trained=is_trained, logprobs=[0.0] * len(completion), versions=()
        ).digest

    assert digest([1, 2], 3, 4) == digest([9], 3, 4)
    assert len({digest([1], 3, 4), digest([1], 3), digest([1], 4, 3), digest([1])}) == 4


def changed(share: Summaries, number: int, **fields: int) -> Summaries:
    """A share with one record changed."""
    rows = share.rows.copy()
    for name, value in fields.items():
        rows[name][number] = value
    return replace(share, rows=rows)


def twice(share: Summaries) -> Summaries:
    """A share with its first record at the end once more."""
    return Summaries(
        rows=np.concatenate([share.rows, share.rows[:1]]),
        parts_RK=np.concatenate([share.parts_RK, share.parts_RK[:1]]),
        statuses_RK=np.concatenate([share.statuses_RK, share.statuses_RK[:1]]),
    )


def without(share: Summaries, number: int) -> Summaries:
    """A share without one of its records."""
    keep = np.arange(len(share.rows)) != number
    return Summaries(
        rows=share.rows[keep], parts_RK=share.parts_RK[keep], statuses_RK=share.statuses_RK[keep]
    )


# Rank 1 of three has the episodes 1, 4, 7 and so on.
WRONG = {
    "unknown": (
        lambda share: changed(share, 2, episode=24),
        "rank 1 reported completion 24, but the rollout has the completions 0 to 23",
    ),
    "negative": (
        lambda share: changed(share, 2, episode=-1),
        "rank 1 reported completion -1, but the rollout has the completions 0 to 23",
    ),
    "of another rank": (
        lambda share: changed(share, 1, episode=3),
        "completion 3 was reported twice, by ranks 0, 1",
    ),
    "another row of another rank's": (
        lambda share: changed(share, 1, episode=3, row=1),
        "completion 3 was reported twice, by ranks 0, 1",
    ),
    "a row twice": (twice, "completion 1 was reported twice, by rank 1"),
    "missing": (lambda share: without(share, 1), "of 24 completions no rank reported 1: 4"),
    "none": (
        lambda share: Summaries(
            rows=share.rows[:0], parts_RK=share.parts_RK[:0], statuses_RK=share.statuses_RK[:0]
        ),
        "of 24 completions no rank reported 8: 1, 4, 7, 10, 13, 16, and 2 more",
    ),
    "lacks its first sequence": (
        lambda share: changed(share, 1, row=1),
        "completion 4 lacks one of its sequences; those reported are 1",
    ),
    "lacks one below 0": (
        lambda share: changed(share, 1, row=-1),
        "completion 4 lacks one of its sequences; those reported are -1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_records_that_contradict_the_plan(what: str) -> None:
    spoil, seen = WRONG[what]
    rollout = made()

    def work(comm: CountingComm) -> Summaries:
        comm.activity.step = 5
        share = rollout.share(comm.rank)
        return exchange(spoil(share) if comm.rank == 1 else share, EPISODES, comm)

    stops, _ = on_counting_ranks(3, work)
    assert all(isinstance(stop, GuardStop) for stop in stops), stops
    assert {(stop.finding.code, str(stop.finding.seen)) for stop in stops} == {("F122", f"step 5: {seen}")}


def row_of(row: TokenSequence, what: str) -> TokenSequence:
    """A row with one thing wrong."""
    match what:
        case "shorter":
            return replace(row, token_ids=row.token_ids[1:], is_trained=row.is_trained[1:])
        case "token":
            return replace(row, token_ids=[*row.token_ids[:-1], row.token_ids[-1] ^ 1])
        case "mask":
            return replace(row, is_trained=np.ones_like(row.is_trained))
        case "version":
            return replace(row, versions=tuple((version + 1, count) for version, count in row.versions))
        case "runs":
            return replace(row, versions=tuple((version, count + 1) for version, count in row.versions))
        case "logprobs":
            return replace(row, logprobs=[*row.logprobs[1:], row.logprobs[0] + 0.001])
    assert row.kept is not None
    sets = [set(ids.tolist()) for ids in row.kept]
    match what:
        case "a set less":
            return replace(row, kept=row.kept.part(0, len(row.kept) - 1))
        case "a set without its token":
            sets[2].remove(int(row.trained_ids[2]))
        case "a set with another token":
            sets[1] ^= {(int(row.trained_ids[1]) + 1) % VOCAB}
        case "no sets":
            return replace(row, kept=None)
    if what in SETS:
        return replace(row, kept=KeptSets.of(sets, VOCAB))
    raise AssertionError(what)


VOCAB = 100
SETS = ("a set less", "a set without its token", "a set with another token", "no sets")
ROWS = {
    "shorter": ("F110", "tokens, "),
    "token": ("F110", "other tokens of the same number"),
    "mask": ("F110", "a mask or versions for another number of trained tokens"),
    "runs": ("F110", "a mask or versions for another number of trained tokens"),
    "version": ("F110", "tokens of other policy versions"),
    "logprobs": ("F110", "logprobs that add up to "),
    **dict.fromkeys(SETS, ("F110", "the same tokens, but other records")),
    "lost": ("F122", "rank 1 was to have 8 rows for rank 2, but had 7, 7 of them right"),
    "lost at home": ("F122", "rank 1 was to have 8 rows for rank 1, but had 7, 7 of them right"),
    "one more": ("F122", "rank 1 was to have 7 rows for rank 2, but had 8, 7 of them right"),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_are_not_those_of_their_records(what: str) -> None:
    """Rank 1 sends its rows to rank 2; a fault of one row stops all three."""
    rollout = made(vocab=VOCAB) if what in SETS else made()

    def work(comm: CountingComm) -> dict[int, TokenSequence]:
        owner = rollout.owner_R
        own = np.flatnonzero(owner == comm.rank).tolist()
        held = {n: rollout.tokens[n] for n in own}
        rank_of = owner if what == "lost at home" else np.where(owner == 1, 2, owner)
        if comm.rank == 1 and what.startswith("lost"):
            del held[own[3]]
        elif what == "one more":
            # The receiver knows of another assignment.
            if comm.rank != 1:
                rank_of[np.flatnonzero(owner == 1)[0]] = 1
        elif comm.rank == 1:
            held[own[3]] = row_of(held[own[3]], what)
        return move(held, rollout.known, owner, rank_of, comm)

    stops, _ = on_counting_ranks(3, work)
    assert all(isinstance(stop, GuardStop) for stop in stops), stops
    code, words = ROWS[what]
    assert {stop.finding.code for stop in stops} == {code}
    assert len({str(stop.finding.seen) for stop in stops}) == 1 and words in str(stops[0].finding.seen)


RECORDED = {
    "a set less": "records of what filters kept for ",
    "a set without its token": (
        "1 sampled tokens that are not among those that filters kept for them; the first is trained token 2"
    ),
}


@pytest.mark.parametrize("what", RECORDED)
@pytest.mark.parametrize("moves", [True, False])
def test_sets_of_other_tokens_are_named_wherever_the_row_goes(what: str, moves: bool) -> None:
    """The engine of rank 1 records them, so that every rank knows the row with these sets."""
    rollout = made(vocab=VOCAB)
    spoilt = np.flatnonzero(rollout.owner_R == 1).tolist()[3]
    row = row_of(rollout.tokens[spoilt], what)
    known = [summary_of(row) if n == spoilt else k for n, k in enumerate(rollout.known)]

    def work(comm: CountingComm) -> dict[int, TokenSequence]:
        owner = rollout.owner_R
        held = {n: rollout.tokens[n] for n in np.flatnonzero(owner == comm.rank).tolist()}
        if comm.rank == 1:
            held[spoilt] = row
        return move(held, known, owner, np.where(owner == 1, 2, owner) if moves else owner, comm)

    stops, _ = on_counting_ranks(3, work)
    assert {stop.finding.code for stop in stops} == {"F110"}
    (seen,) = {str(stop.finding.seen) for stop in stops}
    assert f"row {spoilt} of the rollout has " in seen and RECORDED[what] in seen


@pytest.mark.parametrize("vocab", [0, VOCAB])
@pytest.mark.parametrize("kept", [1, 7, 9, 30, -1, -4, -200])
def test_bytes_that_are_not_all_there(kept: int, vocab: int) -> None:
    """Rank 1 sends the first of its bytes alone, wherever that cuts them; all three name it."""
    rollout = made(vocab=vocab)

    def work(comm: CountingComm) -> dict[int, TokenSequence]:
        owner, swap = rollout.owner_R, comm.swap_tensors
        held = {n: rollout.tokens[n] for n in np.flatnonzero(owner == comm.rank).tolist()}
        if comm.rank == 1:
            comm.swap_tensors = lambda given: swap([data[:kept] for data in given])  # type: ignore[method-assign]
        return move(held, rollout.known, owner, np.where(owner == 1, 2, owner), comm)

    stops, _ = on_counting_ranks(3, work)
    assert all(isinstance(stop, GuardStop) for stop in stops), stops
    assert {stop.finding.code for stop in stops} == {"F122"}
    assert "rank 1 was to have 8 rows for rank 2" in str(stops[0].finding.seen)
