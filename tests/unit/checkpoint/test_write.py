"""What is written comes back bit for bit, and a failed write leaves what was there before.

The stages of a write are found by counting the calls to the operating system, so a stage added later is
covered too.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.checkpoint import write
from covey.checkpoint.read import read_states, verify
from covey.checkpoint.registry import State
from covey.checkpoint.shards import whole
from covey.checkpoint.staging import tidy
from covey.checkpoint.write import write_checkpoint
from covey.config.checkpoints import list_checkpoints
from covey.errors import CheckpointError


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")


def save(directory: Path, step: int = 40, **changes: Any) -> Path:
    arguments: dict[str, Any] = {"write_model": write_model, "states": {}, "meta": {}}
    return write_checkpoint(directory, step=step, **(arguments | changes))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45, 1 / 3])
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "fp32": special,
        "bf16": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "also empty": torch.empty(0),
        "transposed": base.T,
        "slice": base[1:3],
        "same storage": base,
        "with gradient": torch.nn.Parameter(base.clone()),
    }
    checkpoint = save(tmp_path, states={"optimizer": State(tensors=tensors)})
    loaded = read_states(checkpoint)["optimizer"].tensors
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape, name
        assert bits(loaded[name]) == bits(tensor.detach()), name


def test_json_comes_back_exactly(tmp_path: Path) -> None:
    floats = [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3]
    body: dict[str, Any] = {
        "floats": floats,
        "big": 2**80,
        "text": "–\u2028 \ud800 é",
        "none": None,
        "nested": {"flag": True},
    }
    loaded = read_states(save(tmp_path, states={"b": State(json=body), "a": State()}))
    assert loaded["b"].json == body
    assert [struct.pack("d", f) for f in loaded["b"].json["floats"]] == [struct.pack("d", f) for f in floats]  # type: ignore[union-attr,index]
    assert list(loaded) == ["a", "b"]
    assert loaded["a"] == State()


def test_the_layout_is_the_documented_one(make_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_checkpoint(40)
    assert checkpoint.name == "checkpoint-40"
    assert set(snapshot(checkpoint)) == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "trainer/state.json",
        "trainer/optimizer.safetensors",
        "trainer/rng/0.safetensors",
    }
    manifest = verify(checkpoint)
    assert (manifest.step, manifest.trainer, manifest.meta) == (40, True, {"covey": "test"})
    assert set(manifest.files) == set(snapshot(checkpoint)) - {"manifest.json"}


def test_files_may_be_read_by_whom_the_umask_allows(make_checkpoint: Callable[..., Path]) -> None:
    former = os.umask(0o027)
    try:
        checkpoint = make_checkpoint(40)
    finally:
        os.umask(former)
    modes = {p.stat().st_mode & 0o777 for p in checkpoint.rglob("*") if p.is_file()}
    assert modes == {0o640} and checkpoint.stat().st_mode & 0o777 == 0o750


def test_without_states_only_the_model_is_kept(make_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_checkpoint(3, trainer=False)
    assert not verify(checkpoint).trainer and not (checkpoint / "trainer").exists()
    with pytest.raises(CheckpointError, match="only the model"):
        read_states(checkpoint)


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/a", "a/", ".hidden", "a b", "a.safetensors", "x\n"])
def test_a_name_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="not a valid component name"):
        save(tmp_path / "run", states={name: State()})
    assert list(tmp_path.iterdir()) == []


def test_names_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'RNG' and 'rng'"):
        save(tmp_path, states={"RNG": State(), "rng": State()})


@pytest.mark.parametrize(
    ("value", "word"),
    [({1: 2}, "key 1"), ([math.nan], r"b\[0\] is nan"), ({1, 2}, "set"), ({"x": math.inf}, "b.x is inf")],
)
def test_json_that_would_change_is_refused_by_its_place(tmp_path: Path, value: Any, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        save(tmp_path, states={"a": State(json={"b": value})})
    with pytest.raises(CheckpointError, match=word):
        save(tmp_path, meta={"b": value})
    assert snapshot(tmp_path) == {}


def _model_fails(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"half")
    raise OSError("disk full")


def _model_takes_reserved_name(directory: Path) -> None:
    (directory / "manifest.json").write_text("{}")


def _model_links(directory: Path) -> None:
    (directory / "model.safetensors").symlink_to("/dev/null")


@pytest.mark.parametrize(
    "changes",
    [
        {"write_model": _model_fails},
        {"write_model": _model_takes_reserved_name},
        {"write_model": _model_links},
        {"states": {"a": State(tensors={"t": torch.eye(2).to_sparse()})}},
    ],
)
def test_a_failed_part_leaves_the_former_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(tmp_path, meta={"which": "former"})
    before = snapshot(tmp_path)
    with pytest.raises((OSError, CheckpointError)):
        save(tmp_path, **changes)
    with pytest.raises((OSError, CheckpointError)):
        save(tmp_path, step=41, **changes)
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-40"]


class Failing:
    """Stands in for functions of the system and interrupts at the n-th call of any of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call


WATCHED = ("fsync", "rename", "replace")
STATES = {
    "a": State(json={"x": 1}, tensors={"t": torch.ones(2)}),
    "rng/0": State(tensors={"t": torch.ones(1)}),
}
SHARDS = {"optimizer": [whole("moment", torch.ones(3))]}


def interrupted_save(directory: Path, step: int, at: int) -> int:
    """Save with an interruption at the `at`-th watched call; return how many calls there were."""
    failing = Failing(at)
    with pytest.MonkeyPatch.context() as patch:
        for name in WATCHED:
            patch.setattr(os, name, failing.wrap(getattr(os, name)))
        for name in ("hash_file", "_write_states", "_write_shards", "write_tensors", "write_text"):
            patch.setattr(write, name, failing.wrap(getattr(write, name)))
        try:
            save(directory, step, states=STATES, shards=SHARDS, meta={"which": "new"})
        except KeyboardInterrupt:
            assert failing.calls >= at
    return failing.calls


@pytest.mark.parametrize("step", [40, 41])
def test_an_interruption_at_any_stage_leaves_the_former_checkpoint(tmp_path: Path, step: int) -> None:
    save(tmp_path, 40, meta={"which": "former"})
    before = snapshot(tmp_path)
    num_calls = interrupted_save(tmp_path / "dry", step, at=0)
    assert num_calls >= 18, "the stages are not being watched"
    stages = num_calls + (step == 40)  # a replacement sets the former one aside first
    for at in range(1, stages + 1):
        interrupted_save(tmp_path, step, at)
        now = {k: v for k, v in snapshot(tmp_path).items() if not k.startswith("dry/")}
        assert now == before, f"interrupted at call {at}"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-40", "dry"], at
    interrupted_save(tmp_path, step, stages + 1)
    assert verify(tmp_path / f"checkpoint-{step}").meta == {"which": "new"}


def test_a_checkpoint_of_the_same_name_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path, states=STATES)
    checkpoint = save(tmp_path, meta={"which": "second"}, states=None)
    assert verify(checkpoint).meta == {"which": "second"}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-40"]


def test_tidy_finishes_what_a_kill_left(tmp_path: Path) -> None:
    save(tmp_path, 40)
    os.rename(tmp_path / "checkpoint-40", tmp_path / ".old-checkpoint-40-0a")
    for name in (".tmp-checkpoint-50-1f", ".del-checkpoint-9-2e"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-of-somebody-else").mkdir()
    save(tmp_path, 41)
    os.rename(tmp_path / "checkpoint-41", tmp_path / ".old-checkpoint-41-0b")
    save(tmp_path, 41, meta={"which": "newer"})
    touched = tidy(tmp_path)
    assert touched == []  # each save has tidied before it wrote
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".tmp-of-somebody-else",
        "checkpoint-40",
        "checkpoint-41",
    ]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-40", "checkpoint-41"]
    assert verify(tmp_path / "checkpoint-41").meta == {"which": "newer"}
