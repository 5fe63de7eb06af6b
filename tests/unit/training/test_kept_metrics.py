"""Metrics of kept sets: exact, whatever rank has the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey.comm import LocalComm
from covey.training.kept_metrics import kept_metrics
from covey.types import Episode, KeptSets, Metric, Score, ScoredGroup, TokenSequence
from covey.types.episode import summary_of
from support.groups import episode, prompt, scored
from support.rollout_shares import CountingComm, on_counting_ranks

VOCAB = 5000


def episodes(num: int = 12) -> list[Episode]:
    """Episodes of up to 60 tokens; every third has no sets, as those of an earlier run, and one no token."""
    draw = np.random.default_rng(3)
    found = []
    for number in range(num):
        length = 0 if number == 4 else int(draw.integers(1, 61))
        own = episode((9,), [1] * length, sibling=number)
        sizes = np.where(draw.random(length) < 0.4, 1, draw.integers(1, 1000, length)).tolist()
        kept = None if number % 3 == 2 else KeptSets.of([range(1, 1 + size) for size in sizes], VOCAB)
        found.append(replace(own, sequences=(replace(own.tokens[0], kept=kept),)))
    return found


def groups(found: list[Episode]) -> list[ScoredGroup]:
    return [scored(found, [Score(total=1.0, parts=())] * len(found), asked=prompt())]


def counts() -> np.ndarray:
    kept = [row.kept for one in episodes() for row in one.tokens]
    return np.concatenate([sets.counts for sets in kept if sets is not None])


def expected() -> dict[str, Metric]:
    every = np.sort(counts())
    num = len(every)
    return {
        "kept/mean": Metric(value=int(every.sum()) / num, count=num),
        "kept/p99": Metric(value=float(every[-int(np.ceil(0.01 * num))]), count=num),
        "kept/singletons": Metric(value=int((every == 1).sum()) / num, count=num),
    }


def test_one_process() -> None:
    assert kept_metrics(groups(episodes()), LocalComm()) == expected()
    assert 0.2 < expected()["kept/singletons"].value < 0.6  # type: ignore[operator]


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_that_have_some_of_the_tokens(world: int) -> None:
    """The last rank has none; all get the same, and no rank is sent tokens."""

    def work(comm: CountingComm) -> dict[str, Metric]:
        known = []
        for number, one in enumerate(episodes()):
            owner = number % (world - 1)
            rows = tuple(row if owner == comm.rank else summary_of(row) for row in one.sequences)
            known.append(replace(one, owner=owner, sequences=rows))
        is_held = [isinstance(row, TokenSequence) for one in known for row in one.sequences]
        assert any(is_held) == (comm.rank < world - 1)
        return kept_metrics(groups(known), comm)

    found, shared = on_counting_ranks(world, work)
    assert found == [expected()] * world
    assert set(shared.sent) == {"sum", "sum_tensor"}


def test_rows_that_every_rank_has_count_once() -> None:
    found, _ = on_counting_ranks(2, lambda comm: kept_metrics(groups(episodes()), comm))
    assert found == [expected()] * 2


def test_without_filters_there_is_nothing_and_nothing_is_sent() -> None:
    plain = [replace(one, sequences=(replace(one.tokens[0], kept=None),)) for one in episodes()]
    found, shared = on_counting_ranks(2, lambda comm: kept_metrics(groups(plain), comm))
    assert found == [{}, {}] and not shared.sent
