"""Ranks on one GPU, a model split over machines, and a run directory that one machine does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.telemetry.owner import LOCK
from covey.training import places
from covey.training.machines import Machines
from covey.training.places import refuse_apart, split_over_machines, two_on_one_gpu
from support.threads import on_ranks


def place(machine: str, gpu: str = "") -> dict[str, str]:
    return {"machine": machine, "host": f"host-{machine}", "gpu": gpu}


def test_two_ranks_on_one_gpu() -> None:
    assert two_on_one_gpu([place("a"), place("a")]) == []
    # One number on two machines is two GPUs.
    assert two_on_one_gpu([place("a", "H100, 1"), place("a", "H100, 2"), place("b", "H100, 1")]) == []
    (found,) = two_on_one_gpu([place("a", "H100, 1"), place("b", "H100, 1"), place("b", "H100, 1")])
    assert found.code == "E209" and "anks 1, 2 use the same GPU of host-b" in found.seen


def test_a_model_that_is_split_over_two_machines() -> None:
    a, b = place("a"), place("b")
    assert split_over_machines([a, a, b, b], 2) == split_over_machines([a, b], 0) == []
    assert split_over_machines([a, b], 1) == []
    for ranks, shards in (([a, b, a, b], 2), ([a, a, a, b, b], 3)):
        (found,) = split_over_machines(ranks, shards)
        assert found.code == "E370" and "host-b" in found.seen


def test_a_run_directory_that_is_not_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "_SHOWN_S", 0.3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / LOCK).write_text('{"pid": 1}\n')

    def refuse(comm: Any, directory: str) -> None:
        others = Machines(None, host=f"host{comm.rank}")  # type: ignore[arg-type]
        monkeypatch.setattr(Machines, "host_of", lambda self, rank: f"host{rank}")
        refuse_apart(tmp_path / directory, comm, others)

    assert on_ranks(2, lambda comm: refuse(comm, "mine")) == [None, None]
    errors = on_ranks(2, lambda comm: refuse(comm, ("mine", "other")[comm.rank]))
    for error in errors:
        assert isinstance(error, ConfigError)
        (found,) = error.problems
        assert (
            found.code == "E414" and "ank 1 on host1 cannot see the files that rank 0 on host0" in found.seen
        )
