"""Tensors of which each rank holds a range of numbers, as DeepSpeed's optimizers step them.

A partition ends anywhere in a tensor, not at a row. Checkpoints have whole tensors, so that any backend goes
on with them: they are put together as they are saved, and each rank reads the rows that its numbers are in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from covey.checkpoint.shards import SavedShards, Shard, deal, whole
from covey.errors import CheckpointError
from covey.learner.sharding.rows import OwnParts, parameter_of
from covey.texts import tr


@dataclass(frozen=True, slots=True)
class Fragment:
    """Holds the place of `count` numbers of a tensor of this shape, from number `first` of the flattened
    tensor on."""

    shape: tuple[int, ...]
    first: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fragment (count,) of a whole tensor."""
        return tensor.detach().reshape(-1).narrow(0, self.first, self.count)

    @property
    def rows(self) -> tuple[int, int]:
        """Return the first row that it lies in, and the row after the last."""
        width = math.prod(self.shape[1:])
        if not self.count or not width:
            return 0, 0
        return self.first // width, -(-(self.first + self.count) // width)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the fragment (count,) out of the `rows` that it lies in."""
        if not self.count or not self.shape:
            return rows.reshape(-1)[: self.count]
        start = self.first - self.rows[0] * math.prod(self.shape[1:])
        return rows.reshape(-1).narrow(0, start, self.count)


class Fragments:
    """Holds this rank's fragments of named tensors; those of all ranks together are the whole tensors."""

    def __init__(self, fragments: Mapping[str, Fragment], device: torch.device) -> None:
        self._fragments, self._device = fragments, device

    def __getitem__(self, name: str) -> Fragment:
        return self._fragments[name]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return a whole float32 tensor of which this rank has a part, to the bit. Collective."""
        fragment = self[name]
        out = torch.zeros(math.prod(fragment.shape), dtype=torch.float32, device=self._device)
        out.narrow(0, fragment.first, fragment.count).copy_(part)
        # As integers, since a sum of floats makes 0 of -0.
        dist.all_reduce(out.view(torch.int32))
        return out.view(fragment.shape)

    def shards(self, parts: Mapping[str, Tensor]) -> list[Shard]:
        """Return what this rank saves of tensors called `KIND/NAME`, of which every rank has a fragment, or
        one number: whole tensors on the CPU, dealt out to ranks by size. Collective."""
        rank, world = dist.get_rank(), dist.get_world_size()
        names = sorted(parts)
        sizes = [math.prod(self[parameter_of(n)].shape) if parts[n].dim() else 1 for n in names]
        own = []
        for name, owner in zip(names, deal(sizes, world), strict=True):
            part = parts[name]
            if part.dim():
                part = self.whole(parameter_of(name), part)
            if owner == rank:
                own.append(whole(name, part.detach().to("cpu", copy=True)))
        return own

    def own_shards(self, saved: SavedShards) -> Mapping[str, Tensor]:
        """Return this rank's fragments of what `shards` gave on any number of ranks."""

        def read(key: str) -> Tensor:
            fragment, shape = self[parameter_of(key)], saved.shape(key)
            if shape != fragment.shape:
                raise CheckpointError(
                    tr(
                        "{key} has shape {shape} in the checkpoint, but {own} in this run",
                        key=key,
                        shape=shape,
                        own=fragment.shape,
                    )
                )
            return fragment.of_rows(saved.read(key, *fragment.rows))

        return OwnParts(saved, read)
