"""What a configuration needs before its first update."""

from __future__ import annotations

import pytest

from covey.algorithm.needs import Needs, needs


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
    assert needs(beta=beta, steps_per_rollout=steps) == expected
