"""Episodes of several turns on two ranks: the steps of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mutants.faults_turns import EXTENDED, REWRITTEN
from mutants.harness import BASE
from support.runs import train_and_watch, train_in_processes

EQUAL = ("reward", "num_turns", "completions/mean_length", "outcome/scored", "outcome/truncated")
CLOSE = ("loss", "grad_norm", "entropy", "entropy_sampled")


@pytest.mark.multi
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    """Each rank has environments of its own; turns in one sequence, and each in its own."""
    given: list[Mapping[str, Any]] = [EXTENDED, REWRITTEN, {**REWRITTEN, "num_iterations": 2, "beta": 0.1}]
    runs = [{**BASE, **options, "output_dir": str(tmp_path / f"two{i}")} for i, options in enumerate(given)]
    halved = [{**run, "per_device_train_batch_size": run["per_device_train_batch_size"] // 2} for run in runs]
    together = train_in_processes(halved, tmp_path / "work")
    for number, (run, two) in enumerate(zip(runs, together, strict=True)):
        one = train_and_watch({**run, "output_dir": str(tmp_path / f"one{number}")})
        assert len(one.metrics) == len(two.metrics) == 3
        for single, double in zip(one.metrics, two.metrics, strict=True):
            assert {name: single[name] for name in EQUAL} == {name: double[name] for name in EQUAL}
            for name in CLOSE:
                assert single[name] == pytest.approx(double[name], rel=1e-3, abs=1e-6)
