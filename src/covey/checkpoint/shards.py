"""Tensors whose rows lie on several ranks: each rank writes its own rows, and any number of ranks reads them.

A directory holds one file a rank. Its tensors are whole, or some rows of a tensor under the name
`NAME[first:last]`; the metadata says how many files there are and what shape a tensor has that is in parts.
A reader asks for rows by the name of the tensor and never learns in which files they lie, so a checkpoint of
eight ranks is read by two, or by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.tensor_file import write_tensors
from covey.errors import CheckpointError
from covey.texts import counted, joined, tr
from covey.weight_files import DamagedFileError, StoredTensor, read_file

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
_MOST_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Shard:
    """Holds rows [first_row, first_row + tensor.shape[0]) of the tensor `name`, whose whole shape is `shape`.

    A tensor without dimensions is whole. What every rank holds is a shard of one of them alone.
    """

    name: str
    tensor: Tensor
    first_row: int
    shape: Shape


def whole(name: str, tensor: Tensor) -> Shard:
    """Return a tensor as one shard."""
    return Shard(name, tensor, 0, tuple(tensor.shape))


def share_of(tensors: Mapping[str, Tensor], rank: int, world: int) -> Iterator[Shard]:
    """Return the tensors that this rank writes of those that every rank holds whole: dealt out by size,
    whatever their order."""
    names = sorted(tensors)
    owners = deal([tensors[n].numel() * tensors[n].element_size() for n in names], world)
    return (whole(n, tensors[n]) for n, owner in zip(names, owners, strict=True) if owner == rank)


def deal(sizes: Sequence[int], world: int) -> list[int]:
    """Give each size to a rank, the largest first, always to the one that has least: nearly equal sums."""
    owners, held = [0] * len(sizes), [0] * world
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = held.index(min(held))
        held[owners[index]] += sizes[index]
    return owners


def shard_file(rank: int) -> str:
    """Return the name of a rank's file: "rank-00000.safetensors"."""
    return f"rank-{rank:05d}.safetensors"


def write_shards(directory: Path, shards: Iterable[Shard], rank: int, world: int) -> tuple[str, FileEntry]:
    """Write a rank's shards into a file of its own in `directory`; returns the file's name and entry."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    parts: dict[str, tuple[str, int, Shape]] = {}
    for shard in shards:
        rows = tuple(shard.tensor.shape)
        key = shard.name
        if rows != shard.shape:
            last = shard.first_row + rows[0]
            assert rows[1:] == shard.shape[1:] and last <= shard.shape[0], (
                f"{shard.name} is no row of a tensor"
            )
            key = f"{shard.name}[{shard.first_row}:{last}]"
            parts[key] = (shard.name, shard.first_row, shard.shape)
        if key in tensors:
            raise CheckpointError(tr("rank {rank} has two parts with the key {key}", rank=rank, key=key))
        if key == shard.name or rows[0]:
            tensors[key] = shard.tensor
    metadata = {"rank": str(rank), "world": str(world), "parts": json.dumps(parts)}
    name = shard_file(rank)
    return name, write_tensors(directory / name, tensors, metadata)


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds rows of a tensor: the tensor `key` of a file."""

    file: Path
    key: str
    first: int
    last: int


class SavedShards(Mapping[str, "Tensor"]):
    """Maps names to the whole tensors of a directory of shards; `read` gives some rows of a tensor.

    Constructing reads headers alone, without torch. Raises CheckpointError where a file is missing or
    damaged, and where rows are missing or there twice, by the names of the tensors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[str, list[_Part]] = {}
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self._opened: dict[Path, Any] = {}
        faults = self._find() or self._gaps()
        if faults:
            raise damaged(directory, faults)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole tensor, in memory of its own."""
        shape = self.shape(name)
        return self.read(name, 0, shape[0]) if shape else self._open(name).get_tensor(name).clone()

    def shape(self, name: str) -> Shape:
        """Return the shape of the whole tensor; CheckpointError where there is none of this name."""
        if name not in self._shapes:
            raise CheckpointError(
                tr("no file in {directory} holds the tensor {name}", directory=self._directory, name=name)
            )
        return self._shapes[name]

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of a tensor on the CPU, from whatever files they lie in."""
        import torch

        shape = self.shape(name)
        assert shape and 0 <= first <= last <= shape[0], f"{name} has no rows {first} to {last}"
        rows: Tensor | None = None
        for part in self._parts[name]:
            start, end = max(first, part.first), min(last, part.last)
            if start < end:
                found = self._handle(part.file).get_slice(part.key)[start - part.first : end - part.first]
                if rows is None:
                    rows = torch.empty((last - first, *shape[1:]), dtype=found.dtype)
                rows[start - first : end - first] = found
        if rows is not None:
            return rows
        empty: Tensor = self._open(name).get_slice(self._parts[name][0].key)[0:0]
        return empty.clone()

    def _open(self, name: str) -> Any:
        return self._handle(self._parts[name][0].file)

    def _handle(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = safe_open(str(file), framework="pt")
        return self._opened[file]

    def _find(self) -> list[str]:
        """Read what lies in each file; returns what is wrong with them."""
        files = sorted(self._directory.glob("rank-*.safetensors"))
        if not files:
            return [tr("it has no rank-*.safetensors file")]
        try:
            held = {file: read_file(file) for file in files}
            worlds = {int(metadata["world"]) for _, metadata in held.values()}
            if len(worlds) > 1:
                return [
                    tr(
                        "its files were written by runs with different numbers of ranks: {worlds}",
                        worlds=joined(tr(" and "), map(str, sorted(worlds))),
                    )
                ]
            world = worlds.pop()
            expected = {shard_file(rank) for rank in range(world)}
            missing = tr("{name} is missing: the run had {ranks}")
            surplus = tr("{name} does not belong to the checkpoint: the run had only {ranks}")
            if odd := sorted(expected ^ {file.name for file in files}):
                return [
                    tr(missing if name in expected else surplus, name=name, ranks=counted(world, "rank"))
                    for name in odd
                ]
            return [fault for file, found in held.items() for fault in self._take(file, *found)]
        except (OSError, DamagedFileError, KeyError, ValueError, TypeError) as error:
            return [
                f"{error}"
                if isinstance(error, DamagedFileError)
                else tr("it cannot be read: {error!r}", error=error)
            ]

    def _take(
        self, file: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]
    ) -> list[str]:
        faults = []
        parts = json.loads(metadata["parts"])
        for key, stored in tensors.items():
            name, first, shape = parts.get(key, (key, 0, stored.shape))
            rows = stored.shape[0] if stored.shape else 1
            known = self._shapes.setdefault(name, tuple(shape)), self._dtypes.setdefault(name, stored.dtype)
            if known != (tuple(shape), stored.dtype) or stored.shape[1:] != tuple(shape[1:]):
                faults.append(tr("{name} has parts of different dtypes or shapes", name=name))
            self._parts.setdefault(name, []).append(_Part(file, key, first, first + rows))
        return faults

    def _gaps(self) -> list[str]:
        """Return rows that are missing or there twice."""
        faults = []
        for name, parts in self._parts.items():
            total = self._shapes[name][0] if self._shapes[name] else 1
            end = 0
            for part in sorted(parts, key=lambda p: (p.first, p.last)):
                if part.first > end:
                    faults.append(
                        tr(
                            "{name}: rows {end} to {first} of {total} are missing",
                            name=name,
                            end=end,
                            first=part.first - 1,
                            total=total,
                        )
                    )
                elif part.first < end:
                    faults.append(
                        tr(
                            "{name}: rows {first} to {end} are stored twice",
                            name=name,
                            first=part.first,
                            end=end - 1,
                        )
                    )
                end = max(end, part.last)
            if end < total:
                faults.append(
                    tr(
                        "{name}: rows {end} to {last} of {total} are missing",
                        name=name,
                        end=end,
                        last=total - 1,
                        total=total,
                    )
                )
            elif end > total:
                faults.append(
                    tr(
                        "{name}: rows up to {end} are stored, but its shape has only {total}",
                        name=name,
                        end=end - 1,
                        total=total,
                    )
                )
        return faults


def damaged(path: Path, faults: Sequence[str]) -> CheckpointError:
    """Return the error of a checkpoint with these faults, of which the first ones are named."""
    rest = len(faults) - _MOST_FAULTS
    more = tr("; and {num_faults} more", num_faults=rest) if rest > 0 else ""
    shown = joined("; ", faults[:_MOST_FAULTS])
    return CheckpointError(tr("{path}: {faults}{more}", path=path, faults=shown, more=more))
