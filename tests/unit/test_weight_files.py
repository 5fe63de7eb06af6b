"""Headers of safetensors files, held to their files and to their index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from covey.weight_files import (
    INDEX,
    WHOLE,
    DamagedFileError,
    read_header,
    same_bytes,
    stored_tensors,
    weight_files,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(path: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write(tmp_path / SHARDS[0], a=np.zeros((2, 3), np.float32))
    write(tmp_path / SHARDS[1], b=np.ones(4, np.float16), c=np.ones(1, np.int64))
    weight_map = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_tensors_of_all_shards(sharded: Path) -> None:
    found = {name: (t.dtype, t.shape, t.file.name) for name, t in stored_tensors(sharded).items()}
    assert found == {
        "a": ("F32", (2, 3), SHARDS[0]),
        "b": ("F16", (4,), SHARDS[1]),
        "c": ("I64", (1,), SHARDS[1]),
    }
    # What transformers loads where both are there, and nothing beside it.
    write(sharded / WHOLE, d=np.zeros(1, np.float32))
    write(sharded / "consolidated.safetensors", e=np.zeros(1, np.float32))
    assert list(stored_tensors(sharded)) == ["d"]
    assert [file.name for file in weight_files(sharded)] == [WHOLE]


def test_a_directory_without_weights(tmp_path: Path) -> None:
    write(tmp_path / "other.safetensors", a=np.zeros(1))
    assert weight_files(tmp_path) == []
    assert stored_tensors(tmp_path) == {}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def _reshape(path: Path) -> None:
    content = path.read_bytes()
    assert b"[2,3]" in content
    path.write_bytes(content.replace(b"[2,3]", b"[2,2]"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, "bytes long, but its header describes"),
        (_lengthen, "bytes long, but its header describes"),
        (_reshape, "which is not the size of F32 of shape (2, 2)"),
        (lambda path: path.write_bytes(b""), "has no header"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "has no header"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"nope"), "cannot be read"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(sharded: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(sharded / SHARDS[0])
    with pytest.raises(DamagedFileError) as raised:
        stored_tensors(sharded)
    assert SHARDS[0] in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": SHARDS[1], "b": SHARDS[1], "c": SHARDS[0]}, f"a is in {SHARDS[1]}, but it is in {SHARDS[0]}"),
        ({"a": SHARDS[0], "b": SHARDS[1], "z": SHARDS[1]}, f"z is in {SHARDS[1]}, but it is not there"),
        ({}, "lists no weight files"),
        ({"a": 1}, "lists no weight files"),
    ],
)
def test_an_index_that_is_not_of_these_files(sharded: Path, weight_map: object, words: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedFileError) as raised:
        stored_tensors(sharded)
    assert words in str(raised.value)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    write(sharded / SHARDS[1], a=np.zeros(1), b=np.ones(4, np.float16), c=np.ones(1, np.int64))
    with pytest.raises(DamagedFileError, match=r"a is in two files: .*00001.* and .*00002"):
        stored_tensors(sharded)


def test_bytes_that_are_the_same(tmp_path: Path) -> None:
    table = np.arange(3_000_000, dtype=np.float32)
    other = table.copy()
    other[500_000] = 0
    path = write(tmp_path / WHOLE, a=table, b=table.copy(), c=other, d=table[1:].copy())
    found = read_header(path)
    assert same_bytes(found["a"], found["b"])
    assert not same_bytes(found["a"], found["c"])
    assert not same_bytes(found["a"], found["d"])
