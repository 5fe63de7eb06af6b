"""A checkpoint that several ranks write: each its own files, sealed once by the first, the same failure on
all of them."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.checkpoint import manifest, read, tensor_file, write
from covey.checkpoint.read import read_shards, read_states, verify
from covey.checkpoint.registry import State
from covey.checkpoint.retain import retain
from covey.checkpoint.shards import Shard, whole
from covey.checkpoint.tensor_file import write_tensors
from covey.checkpoint.write import write_checkpoint
from covey.errors import CheckpointError, OtherRankFailed
from support.threads import on_ranks

STATES = {"progress": State(json={"step": 4}), "rollout": State(tensors={"old": torch.arange(5.0)})}
MOMENT = torch.arange(12.0).reshape(6, 2)


def save(directory: Path, comm: Any, step: int = 4, **changes: Any) -> Path:
    """Each rank has rows of one moment, and a file of the model."""
    each = MOMENT.shape[0] // comm.world
    first = comm.rank * each
    shard = Shard("exp_avg/w", MOMENT[first : first + each], first, (6, 2))

    def write_model(target: Path) -> dict[str, Any]:
        if comm.rank == 0:
            (target / "config.json").write_text("{}")
        name = f"model-{comm.rank}.safetensors"
        return {name: write_tensors(target / name, {"w": MOMENT})}

    given: dict[str, Any] = {"write_model": write_model, "shards": {"optimizer": [shard]}, "states": STATES}
    return write_checkpoint(directory, step=step, meta={}, comm=comm, **(given | changes))


def test_every_rank_writes_its_own_and_any_number_reads(tmp_path: Path) -> None:
    paths = on_ranks(3, lambda comm: save(tmp_path, comm))
    assert paths == [tmp_path / "checkpoint-4"] * 3
    found = verify(paths[0])
    ranks = [f"trainer/optimizer/rank-{rank:05d}.safetensors" for rank in range(3)]
    models = [f"model-{rank}.safetensors" for rank in range(3)]
    assert set(found.files) == {
        *ranks,
        *models,
        "config.json",
        "trainer/state.json",
        "trainer/rollout.safetensors",
    }
    states, shards = read_states(paths[0]), read_shards(paths[0])
    assert set(states) == {"progress", "rollout"} and states["progress"].json == {"step": 4}
    assert torch.equal(shards["optimizer"]["exp_avg/w"], MOMENT)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]


def test_no_rank_goes_on_before_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real = write.store_manifest
    monkeypatch.setattr(write, "store_manifest", lambda *given: (time.sleep(0.3), real(*given)))
    is_there = on_ranks(2, lambda comm: save(tmp_path, comm).is_dir())
    assert is_there == [True, True]


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["full disk", "bad state", "unforeseen"])
def test_what_fails_on_one_rank_fails_on_all(rank: int, kind: str, tmp_path: Path) -> None:
    on_ranks(2, lambda comm: save(tmp_path, comm))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def failing(comm: Any) -> Path:
        def write_model(target: Path) -> None:
            if comm.rank == rank:
                errors = {
                    "full disk": full(target / "m"),
                    "bad state": CheckpointError("bad"),
                    "unforeseen": ValueError("x"),
                }
                raise errors[kind]

        return save(tmp_path, comm, write_model=write_model)

    errors = on_ranks(2, failing)
    if kind == "full disk":
        assert [(type(e), e.errno, Path(e.filename).name) for e in errors] == [
            (OSError, errno.ENOSPC, "m")
        ] * 2
    elif kind == "bad state":
        assert [(type(e), str(e)) for e in errors] == [(CheckpointError, "bad")] * 2
    else:
        assert type(errors[rank]) is ValueError and type(errors[1 - rank]) is OtherRankFailed
        assert f"rank {rank}" in str(errors[1 - rank])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]


def test_a_rank_on_another_disk_is_named(tmp_path: Path) -> None:
    def save_elsewhere(comm: Any) -> Path:
        return save(tmp_path / str(comm.rank), comm)

    errors = on_ranks(2, save_elsewhere)
    assert all(isinstance(e, OSError | CheckpointError) for e in errors)
    assert not any((tmp_path / "0").glob("*"))


class Reads:
    """Counts how often each file of a directory is hashed, and how often it is hashed while it is written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hashed: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._lock = threading.Lock()
        real, real_write = manifest.hash_file, tensor_file._write

        def hash_file(path: Path) -> str:
            with self._lock:
                self.hashed[path.name] += 1
            return real(path)

        def counted(path: Path, *parts: Any) -> Any:
            with self._lock:
                self.written[path.name] += 1
            return real_write(path, *parts)

        for module in (write, read):
            patch.setattr(module, "hash_file", hash_file)
        patch.setattr(tensor_file, "_write", counted)


def test_every_file_is_hashed_once_and_no_former_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written here takes its sum on the way; a file that another library wrote is read once."""
    on_ranks(2, lambda comm: save(tmp_path, comm, step=2))
    reads = Reads(monkeypatch)

    def save_and_retain(comm: Any) -> None:
        path = save(tmp_path, comm)
        if comm.rank == 0:
            retain(tmp_path, total_limit=2, keep_trainer_state=1, protected=(), written=path)

    assert on_ranks(2, save_and_retain) == [None, None]
    monkeypatch.undo()
    assert reads.hashed == {"config.json": 1}
    assert set(reads.written.values()) == {1} and len(reads.written) == 6
    assert verify(tmp_path / "checkpoint-4").trainer and not verify(tmp_path / "checkpoint-2").trainer


def test_names_of_components_do_not_meet(tmp_path: Path) -> None:
    def clash(comm: Any) -> Path:
        return save(tmp_path, comm, shards={"progress": [whole("x", MOMENT)]})

    (error,) = on_ranks(1, clash)
    assert isinstance(error, CheckpointError) and "progress" in str(error)
