"""Which completions share a row of the cache, against a cache of token lists."""

from __future__ import annotations

import random
from collections import deque

import pytest

from covey.rollout.native.branches import Branches
from covey.rollout.native.rows import Family, Row


def row(number: int, slot: int, *tokens: int) -> Row:
    return Row(number, None, Family(slot, (slot,), deque()), 0, 0.0, tokens=list(tokens))


def ids(branches: Branches) -> list[list[int]]:
    return [[r.id for r in branch] for branch in branches.held]


def test_completions_of_one_prompt_with_one_first_token_share_a_row():
    rows = [row(0, 0, 5), row(1, 0, 6), row(2, 0, 5), row(3, 1, 5)]
    branches = Branches(may_share=True)
    assert [r.id for r in branches.start(rows)] == [0, 1, 3]
    assert ids(branches) == [[0, 2], [1], [3]]
    assert [r.id for r in branches.rows] == [0, 2, 1, 3]
    alone = Branches(may_share=False)
    assert [r.id for r in alone.start(rows)] == [0, 1, 2, 3]
    assert ids(alone) == [[0], [1], [2], [3]]


def test_those_that_draw_other_tokens_get_rows_of_their_own():
    rows = [row(number, 0, 5) for number in range(4)]
    branches = Branches(may_share=True)
    branches.start(rows)
    for r, token in zip(rows, (7, 8, 7, 9), strict=True):
        r.tokens.append(token)
    assert branches.part() == ([0, 0], [1, 2])
    assert ids(branches) == [[0, 2], [1], [3]]
    # One that ended leaves its row to one that parts.
    rows[1].has_ended = True
    for r, token in zip(rows, (1, 1, 2, 1), strict=True):
        r.tokens.append(token)
    assert branches.part() == ([0], [1])
    assert ids(branches) == [[0], [2], [3]]
    # Or to the last row, where none does.
    rows[0].has_ended = True
    assert branches.part() == ([2], [0])
    assert ids(branches) == [[3], [2]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("may_share", [True, False])
def test_every_row_of_the_cache_holds_the_tokens_of_its_completions(seed, may_share):
    chance = random.Random(seed)
    branches = Branches(may_share=may_share)
    cache: dict[int, tuple[int, ...]] = {}
    running: list[Row] = []
    started = 0
    for _ in range(40):
        fresh = [
            row(started + i, chance.randrange(2), chance.randrange(2)) for i in range(chance.randrange(4))
        ]
        started += len(fresh)
        first = len(branches.held)
        for number, lead in enumerate(branches.start(fresh), start=first):
            cache[number] = (lead.family.slot,)
        running += fresh
        # A step of decoding feeds each row of the cache its newest token, and draws for every completion.
        for number, branch in enumerate(branches.held):
            cache[number] += (branch[0].tokens[-1],)
        for r in running:
            r.tokens.append(chance.choices(range(3), (8, 1, 1))[0])
            r.has_ended = chance.random() < 0.1
        running = [r for r in running if not r.has_ended]
        sources, targets = branches.part()
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets)
        for source, target in zip(sources, targets, strict=True):
            cache[target] = cache[source]
        assert sorted(r.id for r in branches.rows) == sorted(r.id for r in running)
        for number, branch in enumerate(branches.held):
            assert branch and (may_share or len(branch) == 1)
            for r in branch:
                assert cache[number] == (r.family.slot, *r.tokens[:-1])
                assert r.tokens[-1] == branch[0].tokens[-1]
    assert started > 20
