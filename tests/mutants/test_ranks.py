"""A fault in one of two processes is named on both of them, and a rank that hangs by what it hangs in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mutants import faults_publish, faults_ranks, stories
from mutants.harness import Mutant, Seen
from mutants.ranks import seen_in_two

pytestmark = pytest.mark.multi


MUTANTS = (*faults_ranks.MUTANTS, *faults_publish.RANKS)
HEALTHY = (*faults_ranks.HEALTHY, *faults_publish.HEALTHY_RANKS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Seen]:
    """What was seen of all faults but hangs, one after the other in the same two processes."""
    together = (*HEALTHY, *MUTANTS)
    return seen_in_two(together, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_fault_of_one_rank_is_named(mutant: Mutant, found: Mapping[str, Seen]) -> None:
    seen = found[mutant.name]
    assert (seen.code, seen.step) == (mutant.code, mutant.step)
    assert mutant.says in seen.words


@pytest.mark.parametrize("mutant", HEALTHY, ids=lambda m: m.name)
def test_two_ranks_without_a_fault_are_silent(mutant: Mutant, found: Mapping[str, Seen]) -> None:
    assert found[mutant.name].code is None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", stories.RANKS, ids=lambda m: m.name)
def test_a_rank_that_hangs_is_named(mutant: Mutant, tmp_path: Path) -> None:
    seen = seen_in_two([mutant], tmp_path / "work")[mutant.name]
    assert (seen.code, seen.step) == (mutant.code, mutant.step)
    assert mutant.says in seen.words
