from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.checkpoint import retain as module
from covey.checkpoint.read import read_states, verify
from covey.checkpoint.retain import Deletion, retain
from covey.config.checkpoints import list_checkpoints
from covey.errors import CheckpointError

Make = Callable[..., Path]


def steps(directory: Path) -> list[int]:
    return [int(p.name.removeprefix("checkpoint-")) for p in list_checkpoints(directory)]


def with_trainer(directory: Path) -> list[int]:
    return [verify(p).step for p in list_checkpoints(directory) if (p / "trainer").exists()]


def kinds(deletions: list[Deletion]) -> list[tuple[int, str]]:
    return [(d.step, d.kind) for d in deletions]


def apply(directory: Path, **changes: Any) -> list[Deletion]:
    arguments: dict[str, Any] = {"total_limit": 2, "keep_trainer_state": 1, "protected": ()}
    return retain(directory, **(arguments | changes))


def test_the_newest_stay_and_only_the_newest_keeps_its_trainer(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make_checkpoint(step)
    deletions = apply(tmp_path)
    assert kinds(deletions) == [(1, "checkpoint"), (2, "checkpoint"), (3, "trainer")]
    assert deletions[0].path == tmp_path / "checkpoint-1" and deletions[0].freed_bytes > 1_000
    assert deletions[2].path == tmp_path / "checkpoint-3" / "trainer"
    assert 0 < deletions[2].freed_bytes < deletions[0].freed_bytes
    assert (steps(tmp_path), with_trainer(tmp_path)) == ([3, 10], [10])
    reduced = verify(tmp_path / "checkpoint-3")
    assert (
        not reduced.trainer
        and reduced.meta == {"covey": "test"}
        and set(reduced.files)
        == {
            "config.json",
            "model.safetensors",
        }
    )
    assert set(read_states(tmp_path / "checkpoint-10")) == {"cursor", "optimizer", "rng/0"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-3"]
    assert apply(tmp_path) == []


def test_no_limit_keeps_every_model(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(step)
    assert kinds(apply(tmp_path, total_limit=None, keep_trainer_state=2)) == [(1, "trainer")]
    assert (steps(tmp_path), with_trainer(tmp_path)) == ([1, 2, 3], [2, 3])


def test_protected_ones_stay_beside_the_limit(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make_checkpoint(step)
    assert kinds(apply(tmp_path, protected=[tmp_path / "checkpoint-1"])) == [
        (1, "trainer"),
        (2, "checkpoint"),
        (3, "trainer"),
    ]
    assert steps(tmp_path) == [1, 3, 4]
    verify(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("limit", [0, 1])
def test_the_newest_is_never_deleted(make_checkpoint: Make, tmp_path: Path, limit: int) -> None:
    for step in (1, 2):
        make_checkpoint(step)
    apply(tmp_path, total_limit=limit, keep_trainer_state=1)
    assert (steps(tmp_path), with_trainer(tmp_path)) == ([2], [2])


def test_nothing_goes_while_the_newest_is_damaged(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(step)
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    assert apply(tmp_path, total_limit=1) == []
    assert steps(tmp_path) == [1, 2, 3]
    verify(tmp_path / "checkpoint-1")


def test_a_damaged_one_does_not_count_towards_the_limit(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make_checkpoint(step)
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    assert kinds(apply(tmp_path)) == [(1, "checkpoint"), (2, "trainer")]
    assert steps(tmp_path) == [2, 3, 4]


def test_a_directory_that_is_not_ours_stays(make_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "pytorch_model.bin").write_bytes(b"x")
    for step in (2, 3):
        make_checkpoint(step)
    assert kinds(apply(tmp_path, total_limit=1)) == [(2, "checkpoint")]
    assert steps(tmp_path) == [1, 3]


def test_a_kill_during_reduction_is_finished_later(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make_checkpoint(step)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            apply(tmp_path)
    with pytest.raises(CheckpointError, match=r"trainer/state\.json is not listed in its manifest"):
        verify(tmp_path / "checkpoint-1")
    apply(tmp_path)
    assert not verify(tmp_path / "checkpoint-1").trainer
    assert with_trainer(tmp_path) == [2]


def test_an_empty_directory_is_no_error(tmp_path: Path) -> None:
    assert apply(tmp_path) == [] and apply(tmp_path / "absent") == []
