"""Filters of sampling: two ways in torch against a slow oracle, and bitmaps against lists of ids."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.kernels.draws import Filters
from covey.rollout import filters as filters_module
from covey.rollout.filters import bitmaps, kept_tokens
from covey.rollout.noise import draws, sample, token_table
from covey.types import KeptSets
from support.filters import kept_slowly

CPU = torch.device("cpu")
# top_p, top_k, min_p
SETTINGS = (
    (1.0, 0, 0.0),
    (0.9, 0, 0.0),
    (0.3, 0, 0.0),
    (1e-9, 0, 0.0),
    (0.999999, 0, 0.0),
    (1.0, 5, 0.0),
    (1.0, 1, 0.0),
    (1.0, 10**6, 0.0),
    (1.0, 0, 0.1),
    (1.0, 0, 1.0),
    (0.9, 20, 0.0),
    (0.95, 0, 0.02),
    (0.5, 30, 0.05),
)


def filters_of(settings, *, may_wait=True) -> Filters:
    top_p, top_k, min_p = zip(*settings, strict=True)
    return Filters(
        torch.tensor(top_p, dtype=torch.float64), torch.tensor(top_k), torch.tensor(min_p), may_wait=may_wait
    )


def both_ways(logit_RV, settings) -> torch.Tensor:
    """The sets, which both ways give."""
    found = kept_tokens(logit_RV, filters_of(settings))
    assert torch.equal(found, kept_tokens(logit_RV, filters_of(settings, may_wait=False)))
    return found


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Rows from nearly even to nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.tensor([0.01, 0.5, 1.0, 3.0, 10.0]).repeat(rows)[:rows, None]
    return width * torch.randn(rows, vocab, generator=generator)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [1, 2, 33, 700, 5000])
def test_the_sets_are_those_of_the_oracle(vocab, setting):
    logit_RV = random_logits(20, vocab)
    found = both_ways(logit_RV, [setting] * 20)
    for row, own in zip(logit_RV, found, strict=True):
        assert own.nonzero()[:, 0].tolist() == kept_slowly(row.numpy(), *setting)
    assert bool(found.any(dim=1).all())


def test_rows_have_filters_of_their_own_and_are_not_moved_by_others():
    logit_RV = random_logits(5 * len(SETTINGS), 900)
    settings = [*SETTINGS] * 5
    found = both_ways(logit_RV, settings)
    for number, setting in enumerate(settings):
        alone = kept_tokens(logit_RV[number : number + 1], filters_of([setting]))[0]
        assert torch.equal(alone, found[number])
    assert bool(found[::13].all()), "a row without filters keeps all"
    sizes = {int(own.sum()) for own in found}
    assert {1, 5, 900} <= sizes and len(sizes) > 20


def test_equal_logits_at_the_border():
    """top_k keeps all of them, top_p those of the smallest ids, min_p all that reach it."""
    row = torch.tensor([1.0, 2.0, 1.0, 0.0, 2.0, 1.0, 1.0])
    even = torch.zeros(10)

    def kept(logit_V, setting):
        (own,) = both_ways(logit_V[None], [setting])
        assert own.nonzero()[:, 0].tolist() == kept_slowly(logit_V.numpy(), *setting)
        return own.nonzero()[:, 0].tolist()

    assert kept(row, (1.0, 1, 0.0)) == [1, 4]
    assert kept(row, (1.0, 3, 0.0)) == [0, 1, 2, 4, 5, 6]
    assert kept(row, (1.0, 0, 1.0)) == [1, 4]
    assert kept(even, (1.0, 3, 0.0)) == [*range(10)]
    assert kept(even, (0.25, 3, 0.0)) == [0, 1, 2]
    # 2 e^2 and 4 e of 2 e^2 + 4 e + 1: shares of 0.55 and 0.41, that of each lower one is 0.1.
    assert kept(row, (0.56, 0, 0.0)) == [0, 1, 4]
    assert kept(row, (0.7, 0, 0.0)) == [0, 1, 2, 4]
    # A mass of exactly top_p is enough.
    assert kept(torch.zeros(4), (0.5, 0, 0.0)) == [0, 1]
    assert kept(torch.zeros(4), (0.500001, 0, 0.0)) == [0, 1, 2]
    # 0.0 and -0.0 are equal.
    assert kept(torch.tensor([-0.0, 0.0, -1.0]), (1.0, 1, 0.0)) == [0, 1]
    assert kept(torch.tensor([-0.0, 0.0, -1.0]), (0.3, 0, 0.0)) == [0]


@pytest.mark.parametrize("levels", [2, 5, 40])
def test_many_equal_logits(levels):
    generator = torch.Generator().manual_seed(levels)
    logit_RV = torch.randint(levels, (5 * len(SETTINGS), 700), generator=generator) / 4
    settings = [*SETTINGS] * 5
    for row, own, setting in zip(logit_RV, both_ways(logit_RV, settings), settings, strict=True):
        assert own.nonzero()[:, 0].tolist() == kept_slowly(row.numpy(), *setting)


def test_a_token_that_cannot_be_is_in_no_set():
    logit_RV = random_logits(len(SETTINGS), 300)
    logit_RV[:, ::3] = -math.inf
    found = both_ways(logit_RV, SETTINGS)
    assert bool(found[0].all()) and not bool(found[1:, ::3].any())
    for row, own, setting in zip(logit_RV[1:], found[1:], SETTINGS[1:], strict=True):
        assert own.nonzero()[:, 0].tolist() == kept_slowly(row.numpy(), *setting)
    # One token alone is possible.
    logit_RV[:] = -math.inf
    logit_RV[:, 7] = -3.0
    assert both_ways(logit_RV, SETTINGS)[1:].nonzero()[:, 1].tolist() == [7] * (len(SETTINGS) - 1)


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_a_row_of_no_numbers_keeps_all_and_leaves_the_others_alone(spoiled):
    logit_RV = random_logits(len(SETTINGS), 300)
    expected = both_ways(logit_RV, SETTINGS)
    logit_RV[3, 5] = spoiled
    found = both_ways(logit_RV, SETTINGS)
    assert bool(found[3].all())
    assert torch.equal(found[:3], expected[:3]) and torch.equal(found[4:], expected[4:])


@pytest.mark.parametrize("prefix", [1, 3, 10_000])
def test_how_much_is_sorted_at_a_time_does_not_matter(prefix, monkeypatch):
    logit_RV = random_logits(3 * len(SETTINGS), 700)
    expected = kept_tokens(logit_RV, filters_of([*SETTINGS] * 3))
    monkeypatch.setattr(filters_module, "_PREFIX", prefix)
    assert torch.equal(kept_tokens(logit_RV, filters_of([*SETTINGS] * 3)), expected)


# -- bitmaps


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500, 4097])
def test_bitmaps_are_the_sets(vocab):
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.0, 0.001, 0.02, 0.04, 0.5, 1.0])[:, None]
    is_kept = torch.rand(6, vocab, generator=generator) < share
    is_kept[:, -1] = torch.tensor([False, True, False, True, True, True])
    quick, fixed = bitmaps(is_kept, may_wait=True), bitmaps(is_kept, may_wait=False)
    assert quick.dtype == fixed.dtype == torch.int32 and quick.shape == (6, -(-vocab // 32))
    assert torch.equal(quick, fixed)
    lists = [own.nonzero()[:, 0].tolist() for own in is_kept]
    assert KeptSets.of_bitmaps(quick.numpy(), vocab) == KeptSets.of(lists, vocab)
    assert [own.tolist() for own in KeptSets.of_bitmaps(quick.numpy(), vocab)] == lists


def test_no_bitmaps_are_no_sets():
    assert KeptSets.of_bitmaps(np.zeros((0, 3), np.int32), 96) == KeptSets.of([], 96)


# -- draws


@pytest.mark.parametrize("vocab", [300, 1300])
def test_draws_follow_the_softmax_of_what_is_left(vocab):
    logit_V = 4 * torch.randn(vocab, generator=torch.Generator().manual_seed(4))
    rows = 4000
    keys = torch.arange(rows) * 2654435761 % 2**32
    given = torch.full((rows,), 0.8), keys, torch.zeros(rows).long(), token_table(vocab, CPU)
    found = sample(logit_V.expand(rows, -1), *given, filters=filters_of([(0.95, 12, 0.001)] * rows))
    kept = kept_slowly((logit_V / 0.8).numpy(), 0.95, 12, 0.001)
    assert found.kept is not None and 4 < len(kept) <= 12
    assert KeptSets.of_bitmaps(found.kept[:1].numpy(), vocab) == KeptSets.of([kept], vocab)
    share = (logit_V.double() / 0.8)[kept].softmax(0)
    counts = torch.stack([(found.tokens == token).sum() for token in kept])
    assert int(counts.sum()) == rows
    chi_square = float(((counts - rows * share).square() / (rows * share)).sum())
    # Five standard deviations above the mean.
    assert chi_square < len(kept) + 5 * math.sqrt(2 * len(kept))
    place = {token: number for number, token in enumerate(kept)}
    expected = share.log()[[place[token] for token in found.tokens.tolist()]]
    assert float((found.logprobs - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("vocab", [300, 1300])
@pytest.mark.parametrize("may_wait", [True, False])
def test_a_row_without_filters_draws_the_same_bits_beside_rows_with_them(vocab, may_wait):
    logit_RV = random_logits(2 * len(SETTINGS), vocab)
    keys, positions = torch.arange(len(logit_RV)) * 2654435761 % 2**32, torch.arange(len(logit_RV))
    given = torch.full((len(logit_RV),), 0.7), keys, positions, token_table(vocab, CPU)
    plain = sample(logit_RV, *given)
    assert plain.kept is None
    drawn = sample(logit_RV, *given, filters=filters_of([*SETTINGS] * 2, may_wait=may_wait))
    for row in (0, len(SETTINGS)):
        assert drawn.tokens[row] == plain.tokens[row] and drawn.logprobs[row] == plain.logprobs[row]
    assert not torch.equal(drawn.tokens, plain.tokens)
    assert drawn.kept is not None
    sets = KeptSets.of_bitmaps(drawn.kept.numpy(), vocab)
    assert sets.lacks(drawn.tokens.tolist()) == []
    one = replace(filters_of([SETTINGS[6]] * len(logit_RV)), may_wait=may_wait)
    certain = sample(logit_RV, *given, filters=one)
    assert bool((certain.logprobs == 0).all()) and torch.equal(certain.tokens, logit_RV.argmax(dim=1))


# -- margins


@pytest.mark.parametrize("vocab", [7, 300, 1300])
def test_what_the_noise_draws_behind_filters_holds_within_its_margin(vocab):
    generator = torch.Generator().manual_seed(3)
    settings = [*SETTINGS] * 20
    rows = len(settings)
    logprob_RV = random_logits(rows, vocab).log_softmax(dim=1)
    given = torch.arange(rows) * 2654435761 % 2**32, torch.arange(rows) % 5, token_table(vocab, CPU)
    filters = filters_of(settings)
    expected = sample(logprob_RV, torch.ones(rows), *given, filters=filters)
    drawn_R, margin_R = draws(logprob_RV, *given, filters)
    assert torch.equal(drawn_R, expected.tokens) and bool((margin_R >= 0).all())
    plain_R, plain_margin_R = draws(logprob_RV, *given)
    off = slice(None, None, len(SETTINGS))
    assert torch.equal(drawn_R[off], plain_R[off]) and torch.equal(margin_R[off], plain_margin_R[off])
    # float32 itself moves logprobs by less than a ten thousandth.
    half_R1 = (0.499 * margin_R - 1e-4).clamp(min=0)[:, None]
    assert float((half_R1 > 0).float().mean()) > 0.3
    own = half_R1[:, 0] > 0
    for kind in range(6):
        noise_RV = torch.rand(rows, vocab, generator=generator).mul_(2).sub_(1)
        if kind % 2:
            # What is left against the rest moves the masses at the border most.
            noise_RV = (
                noise_RV.sign() if kind == 1 else torch.where(kept_tokens(logprob_RV, filters), -1.0, 1.0)
            )
        moved_RV = logprob_RV + half_R1 * noise_RV
        assert torch.equal(draws(moved_RV, *given, filters)[0][own], drawn_R[own])
        assert torch.equal(kept_tokens(moved_RV, filters)[own], kept_tokens(logprob_RV, filters)[own])


def test_a_set_whose_border_is_a_tie_has_no_margin():
    logprob_RV = torch.tensor([[2.0, 1.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]]).log_softmax(dim=1)
    given = torch.tensor([5, 5]), torch.tensor([0, 0]), token_table(4, CPU)
    for setting in ((1.0, 2, 0.0), (0.6, 0, 0.0), (1.0, 0, math.exp(-1))):
        margin_R = draws(logprob_RV, *given, filters_of([setting] * 2))[1]
        assert float(margin_R[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(draws(logprob_RV, *given, filters_of([(1.0, 2, 0.0)] * 2))[1][1]) > 0.1
