"""Every loss, ratio, baseline, scale and divergence raises the share of right answers; a run that cannot
learn fails the same bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.config.values import kind_of
from covey.options.schema import Config
from support.learning import BOUND, CONTROL, CURVES, course, end, first_above, start

RUNS = [(section, name, options) for section, curves in CURVES.items() for name, options in curves.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("section", "name", "options"), RUNS, ids=[f"{s}: {n}" for s, n, _ in RUNS])
def test_it_learns(section: str, name: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    values = course(options, tmp_path / "run")
    assert end(values) - start(values) > BOUND


@pytest.mark.slow
def test_the_bound_is_not_met_without_learning(tmp_path: Path) -> None:
    """The same run at learning rate 0; three seeds, so that no lucky one speaks for all."""
    for seed in (42, 1, 2):
        values = course({**CONTROL, "seed": seed}, tmp_path / str(seed))
        assert end(values) - start(values) < BOUND


@pytest.mark.parametrize(
    "option",
    ["loss_type", "importance_sampling_level", "advantage_estimator", "scale_rewards", "kl_estimator"],
)
def test_no_algorithm_is_left_out(option: str) -> None:
    tried = {options.get(option) for _, _, options in RUNS} | {_usual(option)}
    assert tried - {None} == set(kind_of(option).choices)


def _usual(option: str) -> Any:
    """What a run has that says nothing of the option."""
    derived = {"scale_rewards": "group"}
    return derived.get(option) or Config.model_fields[option].default


def test_means_by_hand() -> None:
    values = [0.0] * 10 + [1.0] * 10
    assert (start(values), end(values)) == (0.0, 1.0)
    assert first_above(values, 0.45) == 15
    assert first_above(values, 1.0) is None
