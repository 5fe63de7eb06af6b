"""What a step says of itself, over two ranks: one collective, exact."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from covey.comm import LocalComm
from covey.learner.update import _reduce, _Sums


class _OfTwo(LocalComm):
    """One of two ranks, which sums with what the other one gave; no other collective is allowed."""

    world = 2

    def __init__(self, rank: int, other: Sequence[float] | None = None) -> None:
        super().__init__()
        self.rank = rank
        self.given: list[list[float]] = []
        self._other = other

    def sum(self, values: Sequence[float]) -> list[float]:
        self.given.append(list(values))
        other = self._other or [0.0] * len(values)
        return [a + b for a, b in zip(values, other, strict=True)]

    def max(self, values: Sequence[float]) -> list[float]:
        raise AssertionError("a second collective")


Pairs = Sequence[tuple[list[float], list[float]]]
# Logprobs of engine and learner, a part of them on each rank.
PAIRS: Pairs = [([-1.0], [-1.0]), ([], []), ([-3.0, -2.0], [-2.0, -3.0])]


def sums(
    loss: float,
    entropy: float,
    tokens: int,
    silent: Sequence[bool],
    gaps: Sequence[float],
    pairs: Pairs,
    num_sets: float = 0.0,
) -> _Sums:
    """Of as many passes with signal as `silent` says, and one without that changes nothing."""
    moved = torch.tensor([0, *(not s for s in silent), 0]).cumsum(0)
    values = {"loss": loss, "entropy": entropy, "kl": 0.5, "entropy_kept": loss, "num_sets": num_sets}
    return _Sums(
        {name: [torch.tensor(value, dtype=torch.float64)] for name, value in values.items()},
        tokens=tokens,
        has_signal=[*(True for _ in silent), False],
        gradients=[torch.tensor([1.0, float(m)]) for m in moved],
        gaps=[torch.tensor(g, dtype=torch.float64) for g in gaps],
        pairs=[(torch.tensor(engine), torch.tensor(learner)) for engine, learner in pairs],
    )


@pytest.mark.parametrize(
    ("gaps", "largest"),
    [
        (([0.1, 0.3], [0.2]), 0.3),
        (([0.1], [1e-17, 0.7]), 0.7),
        (([], [1e-3]), 1e-3),
        (([0.0], []), 0.0),
        (([], []), None),
    ],
)
def test_two_ranks_in_one_collective(gaps: tuple[list[float], list[float]], largest: float | None) -> None:
    ours = sums(0.25, 3.0, 10, [True, False, True], gaps[0], PAIRS[:2])
    theirs = sums(-1.0, 5.0, 22, [True], gaps[1], PAIRS[2:])
    first, last = _OfTwo(0), _OfTwo(1)
    _reduce(ours, first)
    _reduce(theirs, last)
    found = [
        _reduce(ours, _OfTwo(0, last.given[0])),
        _reduce(theirs, _OfTwo(1, first.given[0])),
    ]
    assert len(first.given) == len(last.given) == 1
    assert found[0] == found[1]
    metrics, silent, gap = found[0]
    assert (silent, gap) == (3, largest)
    assert {n: (m.value, m.count) for n, m in metrics.items()} == {
        "loss": (-0.75, 32),
        "entropy": (8.0 / 32, 32),
        "kl": (1.0 / 32, 32),
        "sampling/logprob_slope": (pytest.approx(0.5), 3),
        "sampling/logprob_intercept": (pytest.approx(-1.0), 3),
        "sampling/logprob_max_gap": (1.0, 3),
        "sampling/ess": (pytest.approx(0.652900, abs=1e-6), 3),
    }


def test_one_process_and_a_rank_without_a_pass() -> None:
    metrics, silent, gap = _reduce(sums(0.5, 1.0, 4, [], [0.25], [([], [])]), LocalComm())
    assert (silent, gap, metrics["entropy"].value) == (0, 0.25, 0.25)


def test_the_entropy_within_sets_is_a_mean_over_the_tokens_that_have_one() -> None:
    """One rank has none of them."""
    ours, theirs = sums(0.25, 3.0, 10, [], [], [], num_sets=4.0), sums(0.0, 5.0, 22, [], [], [])
    last = _OfTwo(1)
    _reduce(theirs, last)
    metrics, _, _ = _reduce(ours, _OfTwo(0, last.given[0]))
    assert (metrics["entropy_kept"].value, metrics["entropy_kept"].count) == (0.0625, 4)
    assert metrics["entropy"].count == 32 and "num_sets" not in metrics
    metrics, _, _ = _reduce(theirs, _OfTwo(0, last.given[0]))
    assert "entropy_kept" not in metrics
