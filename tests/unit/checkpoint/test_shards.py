"""Rows that several ranks have written are read back by any number of them, bit for bit; what is not there,
or there twice, is named."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from covey.checkpoint.shards import SavedShards, Shard, deal, share_of, whole, write_shards
from covey.checkpoint.tensor_file import write_tensors
from covey.errors import CheckpointError


def rows(name: str, tensor: torch.Tensor, first: int, last: int) -> Shard:
    return Shard(name, tensor[first:last], first, tuple(tensor.shape))


def write(directory: Path, *ranks: list[Shard]) -> SavedShards:
    for rank, shards in enumerate(ranks):
        write_shards(directory, shards, rank, len(ranks))
    return SavedShards(directory)


def test_the_file_is_read_by_the_library_of_the_format(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=g)
    tensors = {
        "fp32": base,
        "transposed": base.T,
        "slice": base[1:3, ::2],
        "bf16": torch.randn(3, 5, generator=g).bfloat16(),
        "odd bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "int64": torch.tensor([-(2**63)]),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    entry = write_tensors(tmp_path / "a.safetensors", tensors, {"note": "x"})
    loaded = load_file(str(tmp_path / "a.safetensors"))
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor.detach()), name
    with safe_open(str(tmp_path / "a.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "x"}
    import hashlib

    data = (tmp_path / "a.safetensors").read_bytes()
    assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_reads_back_in_any_other_cut(seed: int, tmp_path: Path) -> None:
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    world = draw.choice([1, 2, 3, 5])
    shapes = [(7, 3), (1, 4), (64,), (5, 2, 2), (2, 8)]
    tensors = {f"exp_avg/{i}": torch.randn(*shape, generator=g) for i, shape in enumerate(shapes)}
    tensors["exp_avg/low"] = torch.randn(9, 3, generator=g).bfloat16()
    ranks: list[list[Shard]] = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        # As torch chunks a tensor: some ranks may have no row.
        size = -(-tensor.shape[0] // world)
        for rank in range(world):
            first, last = (min(tensor.shape[0], n * size) for n in (rank, rank + 1))
            ranks[rank].append(rows(name, tensor, first, last))
    ranks[draw.randrange(world)].append(whole("step/x", torch.tensor(3.0)))
    saved = write(tmp_path, *ranks)
    assert set(saved) == {*tensors, "step/x"}
    assert torch.equal(saved["step/x"], torch.tensor(3.0)) and saved.shape("step/x") == ()
    for name, tensor in tensors.items():
        assert saved.shape(name) == tuple(tensor.shape)
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor)
        for _ in range(6):
            first, last = sorted(draw.randrange(tensor.shape[0] + 1) for _ in range(2))
            found = saved.read(name, first, last)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor[first:last])


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    saved = write(tmp_path, [whole("m", torch.ones(3)), whole("s", torch.tensor(1.0))])
    saved["m"].zero_()
    saved["s"].zero_()
    assert torch.equal(saved["m"], torch.ones(3)) and float(saved["s"]) == 1.0


TENSOR = torch.arange(20.0).reshape(10, 2)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([(0, 4), (6, 10)], "m: rows 4 to 5 of 10 are missing"),
        ([(0, 4), (4, 9)], "m: rows 9 to 9 of 10 are missing"),
        ([(2, 5), (5, 10)], "m: rows 0 to 1 of 10 are missing"),
        ([(0, 6), (4, 10)], "m: rows 4 to 5 are stored twice"),
        ([(0, 10), (0, 10)], "m: rows 0 to 9 are stored twice"),
    ],
)
def test_missing_rows_and_rows_twice_are_named(
    cuts: list[tuple[int, int]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, *([rows("m", TENSOR, *cut)] for cut in cuts))


def test_a_missing_a_surplus_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    write(tmp_path, [rows("m", TENSOR, 0, 5)], [rows("m", TENSOR, 5, 10)])
    one = tmp_path / "rank-00001.safetensors"
    content = one.read_bytes()
    one.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        SavedShards(tmp_path)
    one.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is .* bytes long"):
        SavedShards(tmp_path)
    one.write_bytes(content)
    write_shards(tmp_path, [], 2, 3)
    with pytest.raises(CheckpointError, match="ranks: 2 and 3"):
        SavedShards(tmp_path)
    with pytest.raises(CheckpointError, match="it has no rank-"):
        SavedShards(tmp_path / "absent")


def test_parts_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="m has parts of different dtypes"):
        write(tmp_path, [rows("m", TENSOR, 0, 5)], [rows("m", TENSOR.double(), 5, 10)])


def test_a_name_that_is_not_there_is_named(tmp_path: Path) -> None:
    saved = write(tmp_path, [whole("m", TENSOR)])
    with pytest.raises(CheckpointError, match="holds the tensor master/x"):
        saved["master/x"]
    assert list(saved) == ["m"]


def test_tensors_are_dealt_out_by_size() -> None:
    assert deal([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    draw = random.Random(0)
    sizes = [draw.randrange(1, 1000) for _ in range(200)]
    owners = deal(sizes, 7)
    sums = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(7)]
    assert max(sums) - min(sums) < 20
    tensors = {str(i): torch.zeros(s) for i, s in enumerate(sizes)}
    shares = [[p.name for p in share_of(tensors, rank, 7)] for rank in range(7)]
    assert sorted(n for share in shares for n in share) == sorted(tensors)
    turned = dict(reversed(tensors.items()))
    assert [[p.name for p in share_of(turned, rank, 7)] for rank in range(7)] == shares


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    write(tmp_path, [rows("m", TENSOR, 0, 5)], [rows("m", TENSOR, 5, 10)])
    program = (
        "import sys; from pathlib import Path; from covey.checkpoint.shards import SavedShards\n"
        "assert SavedShards(Path(sys.argv[1])).shape('m') == (10, 2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0
