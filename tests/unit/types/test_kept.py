"""Kept sets: lists and bitmaps hold the same sets, and tell which tokens they lack."""

from __future__ import annotations

import numpy as np
import pytest

from covey.types import KeptSets
from covey.types.kept import bitmap_words


def drawn(vocab: int, num: int, seed: int = 0) -> list[list[int]]:
    """Sets of all sizes, from a single id to the whole vocabulary."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, vocab + 1, num)
    sizes[: num // 2] = draw.integers(1, bitmap_words(vocab) + 2, num // 2)
    return [np.sort(draw.permutation(vocab)[:size]).tolist() for size in sizes.tolist()]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 1000])
def test_sets_lack_what_is_not_in_them(vocab: int) -> None:
    """Each id of the vocabulary, and ids beside it, against every set."""
    sets = drawn(vocab, 40)
    kept = KeptSets.of(sets, vocab)
    assert [ids.tolist() for ids in kept] == sets
    for token in [-33, -1, *range(vocab), vocab, vocab + 32, 2**31 - 1]:
        assert kept.lacks([token] * len(sets)) == [i for i, own in enumerate(sets) if token not in own]


def test_an_empty_set_lacks_every_token() -> None:
    assert KeptSets.of([[], [3], []], vocab=5).lacks([3, 3, 0]) == [0, 2]
    assert KeptSets.of([], vocab=5).lacks([]) == []


def test_there_is_a_token_for_each_set() -> None:
    with pytest.raises(ValueError, match="1 tokens for 2 kept sets"):
        KeptSets.of([[1], [2]], vocab=5).lacks([1])


def test_equal_sets_have_equal_checksums() -> None:
    sets = drawn(100, 20)
    whole = KeptSets.of(sets, 100)
    assert KeptSets.joined([whole.part(0, 7), whole.part(7, 20)]).checksum == whole.checksum
    others = [
        KeptSets.of([*sets[:-1], [int(i) for i in range(100) if i not in sets[-1]] or [0]], 100),
        KeptSets.of(sets[:-1], 100),
        KeptSets.of(sets[::-1], 100),
        KeptSets.of(sets, 101),
        KeptSets.of([], 100),
    ]
    assert len({whole.checksum, *(other.checksum for other in others)}) == 6
