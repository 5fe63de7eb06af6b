"""What a configuration needs before its first update."""

from __future__ import annotations

import pytest

from covey.batching.needs import Needs, needs
from support.options import algorithm


@pytest.mark.parametrize(
    ("beta", "steps", "expected"),
    [
        (0.0, 1, Needs(old=False, reference=False, may_skip_rows=True)),
        (0.0, 2, Needs(old=True, reference=False, may_skip_rows=True)),
        (0.04, 1, Needs(old=False, reference=True, may_skip_rows=False)),
        (0.04, 8, Needs(old=True, reference=True, may_skip_rows=False)),
    ],
)
def test_needs(beta, steps, expected):
    assert needs(algorithm(beta=beta), steps) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # A divergence that rewards pay for is known before the advantages are: every row is annotated, once.
        (
            {"beta": 0.04, "kl_in_reward": True},
            Needs(old=True, reference=True, may_skip_rows=False, kl_in_reward=True),
        ),
        ({"kl_in_reward": True}, Needs(old=False, reference=False, may_skip_rows=True)),
        # The bonus reaches rows without an advantage.
        ({"entropy_coef": 0.1}, Needs(old=False, reference=False, may_skip_rows=False)),
        (
            {"top_entropy_quantile": 0.2},
            Needs(old=False, reference=False, may_skip_rows=True, entropy=True),
        ),
        (
            {"top_entropy_quantile": 1.0},
            Needs(old=False, reference=False, may_skip_rows=True),
        ),
    ],
    ids=str,
)
def test_needs_of_what_may_be_added(changes, expected):
    assert needs(algorithm(**changes), 1) == expected
