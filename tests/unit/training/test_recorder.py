"""What a rank records of a rollout, alone and with others, each of which is a thread here."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.comm import LocalComm
from covey.errors import RunFailed
from covey.options.output import OutputOptions
from covey.telemetry.files import RunFiles, read_events
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog, RolloutPolicy
from covey.telemetry.rollouts import read_rollouts
from covey.training.recorder import Recorder
from support.threads import on_ranks

RECORDS = [{"group": number, "sibling": 0, "text": "x" * 80} for number in range(6)]


def recorder(output: Path, comm: Any, **limits: Any) -> Recorder:
    """That of a rank, which keeps all files plain."""
    log = RolloutLog(
        output / "rollouts",
        RolloutLimits(compress_after=None, **limits),
        rank=comm.rank,
        world=comm.world,
    )
    files = RunFiles(output) if comm.rank == 0 else None
    return Recorder(options=OutputOptions(output_dir=str(output)), rollouts=log, comm=comm, files=files)


def record(rank: Recorder, rollout: int) -> None:
    """A rollout of which this rank has its share."""
    rank.rollout(rollout, lambda: RECORDS[rank.comm.rank :: rank.comm.world], step=rollout)


@pytest.mark.parametrize(("policy", "kept"), [("all", [0, 1, 2, 3]), (3, [0, 3]), ("none", [])])
def test_the_policy_decides_what_every_rank_writes(
    policy: RolloutPolicy, kept: list[int], tmp_path: Path
) -> None:
    def work(comm: Any) -> None:
        own = recorder(tmp_path, comm, log=policy)
        for rollout in range(4):
            record(own, rollout)

    assert on_ranks(2, work) == [None, None]
    assert list(read_rollouts(tmp_path / "rollouts")) == [(rollout, RECORDS) for rollout in kept]


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_deletion_is_an_event(world: int, tmp_path: Path) -> None:
    """Three rollouts fit."""
    record(recorder(tmp_path, LocalComm()), 0)
    num_bytes = (tmp_path / "rollouts" / "rollout-000000.jsonl").stat().st_size
    shutil.rmtree(tmp_path / "rollouts")

    def work(comm: Any) -> None:
        own = recorder(tmp_path, comm, max_gb=3 * num_bytes / 1e9)
        for rollout in range(6):
            record(own, rollout)

    assert on_ranks(world, work) == [None] * world
    assert [rollout for rollout, _ in read_rollouts(tmp_path / "rollouts")] == [3, 4, 5]
    (event,) = read_events(tmp_path / "events.jsonl")
    first = "rollout-000000.jsonl" if world == 1 else "rollout-000000.0-of-2.jsonl"
    assert (event["kind"], event["step"], event["files"]) == ("rollouts_deleted", 3, [first])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["write", "delete_before"])
def test_what_one_rank_cannot_write_stops_all_of_them(what: str, rank: int, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "the file"))

    def work(comm: Any) -> Any:
        own = recorder(tmp_path, comm)
        record(own, 0)
        if comm.rank == rank:
            setattr(own.rollouts, what, full)
        with pytest.raises(RunFailed) as raised:
            record(own, 1)
        return raised.value.finding

    first, second = on_ranks(2, work)
    assert first == second
    assert first.code == "F130" and "the file" in first.seen and first.step == 1
