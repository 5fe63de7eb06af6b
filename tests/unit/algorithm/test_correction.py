"""Weights against the gap between sampler and trainer: every mode, bound and metric by hand."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.correction import SQUARES, UNBOUNDED, Correction, correction_weights, derived_metrics

# Ratios of trainer to sampler: sequence 0 has 4, 1/2 and 1, of product 2 and geometric mean 2^(1/3); sequence
# 1 has 3 and 3, of product 9 and mean 3.
RATIO = (4.0, 0.5, 1.0, 3.0, 3.0)
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
COUNT = torch.tensor([3, 2])
CUBE = 2.0 ** (1.0 / 3.0)


def weigh(mode: str, threshold: float, **changes: object):
    sampler = torch.tensor([-1.0, -2.0, -3.0, -2.5, -1.5])
    trainer = sampler + torch.tensor(RATIO).log()
    return correction_weights(
        trainer, sampler, SEQUENCE, COUNT, Correction(mode=mode, threshold=threshold, **changes)
    )


@pytest.mark.parametrize(
    ("mode", "is_product", "threshold", "floor", "expected", "outside"),
    [
        ("token_truncate", False, 2.0, 0.0, [2, 0.5, 1, 2, 2], 3),
        ("token_mask", False, 2.0, 0.0, [0, 0.5, 1, 0, 0], 3),
        ("token_truncate", False, 3.5, 0.75, [3.5, 0.75, 1, 3, 3], 2),
        ("token_mask", False, 3.5, 0.75, [0, 0, 1, 3, 3], 2),
        ("sequence_truncate", False, 2.0, 0.0, [CUBE, CUBE, CUBE, 2, 2], 2),
        ("sequence_mask", False, 2.0, 0.0, [CUBE, CUBE, CUBE, 0, 0], 2),
        ("sequence_truncate", True, 3.0, 0.0, [2, 2, 2, 3, 3], 2),
        ("sequence_mask", True, 3.0, 0.0, [2, 2, 2, 0, 0], 2),
        ("sequence_truncate", True, 3.0, 2.5, [2.5, 2.5, 2.5, 3, 3], 5),
        ("sequence_mask", True, 10.0, 2.5, [0, 0, 0, 9, 9], 3),
        ("sequence_mask", True, math.inf, 0.0, [2, 2, 2, 9, 9], 0),
    ],
)
def test_weights_by_hand(mode, is_product, threshold, floor, expected, outside, assert_close_guarded):
    weight_N, sums = weigh(mode, threshold, is_product=is_product, floor=floor)
    assert_close_guarded(weight_N, expected, rtol=1e-5)
    assert float(sums["rollout_correction/clipped_frac"]) == outside
    assert_close_guarded(sums["rollout_correction/is_weight_mean"], sum(expected), rtol=1e-5)
    assert_close_guarded(sums[SQUARES], sum(x * x for x in expected), rtol=1e-5)
    plain = RATIO
    if mode.startswith("sequence"):
        plain = (2, 2, 2, 9, 9) if is_product else (CUBE, CUBE, CUBE, 3, 3)
    assert_close_guarded(sums[UNBOUNDED], sum(x * x for x in plain), rtol=1e-5)


def test_without_a_gap_every_weight_is_exactly_one():
    logprob = -torch.rand(5, generator=torch.Generator().manual_seed(0))
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        weight_N, _ = correction_weights(
            logprob, logprob.clone(), SEQUENCE, COUNT, Correction(mode=mode, threshold=2.0)
        )
        assert torch.equal(weight_N, torch.ones(5))


def test_no_gradient_goes_through_a_weight():
    leaf = torch.tensor([-1.0] * 5, requires_grad=True)
    rule = Correction(mode="token_truncate", threshold=2.0)
    weight_N, _ = correction_weights(leaf, torch.full((5,), -1.2), SEQUENCE, COUNT, rule)
    assert not weight_N.requires_grad


def test_a_gap_of_any_size_stays_finite():
    sampler = torch.tensor([-1e4, 0.0, -1e4, -1e4, -1e4])
    for is_product in (False, True):
        rule = Correction(mode="sequence_truncate", threshold=math.inf, is_product=is_product)
        weight_N, sums = correction_weights(torch.full((5,), -5000.0), sampler, SEQUENCE, COUNT, rule)
        assert weight_N.isfinite().all()
        assert all(torch.isfinite(v) for v in sums.values())


def test_effective_sample_size_and_chi_square_by_hand():
    # Weights 2, 0.5, 1, 2, 2 of ratios 4, 0.5, 1, 3, 3: means 1.5, 13.25 / 5 = 2.65, and 35.25 / 5 = 7.05.
    _, sums = weigh("token_truncate", 2.0)
    metrics = derived_metrics({name: float(v) / 5 for name, v in sums.items()} | {"loss": 0.25})
    assert metrics == {
        "rollout_correction/is_weight_mean": pytest.approx(1.5, rel=1e-6),
        "rollout_correction/clipped_frac": 0.6,
        "rollout_correction/ess": pytest.approx(1.5**2 / 2.65, rel=1e-6),
        "rollout_correction/chi2": pytest.approx(6.05, rel=1e-6),
        "loss": 0.25,
    }


def test_metrics_at_the_ends():
    # Equal weights are worth all their tokens; weights that are all 0, and no tokens, are worth nothing.
    names = ("rollout_correction/is_weight_mean", "rollout_correction/clipped_frac", SQUARES, UNBOUNDED)
    full = derived_metrics(dict(zip(names, (1.0, 0.0, 1.0, 1.0), strict=True)))
    assert (full["rollout_correction/ess"], full["rollout_correction/chi2"]) == (1.0, 0.0)
    none = derived_metrics(dict(zip(names, (0.0, 1.0, 0.0, 9.0), strict=True)))
    assert (none["rollout_correction/ess"], none["rollout_correction/chi2"]) == (None, 8.0)
    empty = derived_metrics(dict.fromkeys(names))
    assert (empty["rollout_correction/ess"], empty["rollout_correction/chi2"]) == (None, None)
    assert derived_metrics({"loss": 1.0}) == {"loss": 1.0}
