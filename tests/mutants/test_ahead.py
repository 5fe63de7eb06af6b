"""Planted faults of rollouts that a server samples ahead, each named at the first step at which it shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mutants.faults_ahead import AHEAD, MUTANTS
from mutants.harness import Mutant, Surveys, nothing, run_with
from support.servers import Running, slow_server, token_file

pytestmark = pytest.mark.multi


@pytest.fixture
def surveys() -> Iterator[Surveys]:
    kept = Surveys()
    yield kept
    kept.close()


@pytest.mark.parametrize(
    "mutant", [*MUTANTS, Mutant("none", "", 1, nothing, AHEAD)], ids=lambda mutant: mutant.name
)
def test_a_planted_fault_is_named(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    # Rows that are to be in the middle of an episode take their time.
    with slow_server(rest_s=0.0 if mutant.code in ("F114", "F122") else 0.1) as server:
        check(mutant, server, surveys, tmp_path)


def check(mutant: Mutant, server: Running, surveys: Surveys, tmp_path: Path) -> None:
    here = {"rollout_servers": [server.address], "rollout_token_file": str(token_file(tmp_path))}
    seen = run_with(replace(mutant, options={**mutant.options, **here}), surveys, tmp_path / "run")
    if mutant.plant is nothing:
        assert seen.code is None
    else:
        assert (seen.code, seen.step) == (mutant.code, mutant.step)
        assert mutant.says in seen.words
