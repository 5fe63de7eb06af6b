"""Every planted fault is named by its own code, at the first step at which it can show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants.faults import MUTANTS
from mutants.harness import Mutant, Surveys, run_with


@pytest.fixture(scope="module")
def surveys() -> Iterator[Surveys]:
    kept = Surveys()
    yield kept
    kept.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_named(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    seen = run_with(mutant, surveys, tmp_path / "run")
    assert (seen.code, seen.step) == (mutant.code, mutant.step)


@pytest.mark.parametrize("options", {m.name: m.options for m in MUTANTS if m.options}.values(), ids=str)
def test_the_same_run_without_a_fault_is_silent(
    options: dict[str, object], surveys: Surveys, tmp_path: Path
) -> None:
    healthy = Mutant("none", "", 0, lambda patch: None, options)
    assert run_with(healthy, surveys, tmp_path / "run").code is None
