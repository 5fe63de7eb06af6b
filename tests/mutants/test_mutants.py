"""Every planted fault is named by its own code, at the first step at which it can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.plan.checks import refuse_faults
from covey.types import Problem
from mutants import faults, faults_inputs, faults_selection, stories
from mutants.harness import BASE, Mutant, Surveys, nothing, run_with

MUTANTS = (
    *faults.MUTANTS,
    *faults_selection.MUTANTS,
    *faults_inputs.MUTANTS,
    *stories.MUTANTS,
)
# The runs in which the fault is planted; where the options are the fault there is none without it.
PLANTED = [m for m in MUTANTS if m.plant is not nothing and (m.options or m.is_resumed)]
HEALTHY = {str((m.options, m.is_resumed)): replace(m, name="none", plant=nothing) for m in PLANTED}
TYPED = [m for m in MUTANTS if m.is_refused and m.plant is nothing]


@pytest.fixture(scope="module")
def surveys() -> Iterator[Surveys]:
    kept = Surveys()
    yield kept
    kept.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_named(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    seen = run_with(mutant, surveys, tmp_path / "run")
    assert (seen.code, seen.step) == (mutant.code, mutant.step)
    assert mutant.says in seen.words
    assert not (mutant.is_refused and (tmp_path / "run").exists())


@pytest.mark.parametrize("healthy", HEALTHY.values(), ids=HEALTHY.keys())
def test_the_same_run_without_a_fault_is_silent(healthy: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    assert run_with(healthy, surveys, tmp_path / "run").code is None


@pytest.mark.parametrize("mutant", TYPED, ids=lambda m: m.name)
def test_what_a_refusal_offers_is_accepted(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    """Whoever types the first edit of every problem has a run."""
    options = {**BASE, **mutant.options, "output_dir": str(tmp_path / "run")}
    facts = surveys.of(options, 1).facts
    with pytest.raises(ConfigError) as refused:
        refuse_faults(from_dict(options, 1), facts)
    problems: list[Problem] = [p for p in refused.value.problems if p.code in mutant.code.split()]
    edits = [next(fix.edits for fix in p.fixes if fix.edits) for p in problems]
    assert len(edits) == len(mutant.code.split())
    for change in edits:
        options |= change
    refuse_faults(from_dict(options, 1), facts)
