"""What ranks say to each other outside the gradient: sums, maxima and JSON bytes, never pickled objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Comm(Protocol):
    """The ranks of a run. Every method is collective."""

    rank: int
    world: int

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def max(self, values: Sequence[float]) -> list[float]: ...

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def gather_json(self, value: Any) -> list[Any]: ...


class LocalComm:
    """One process: every collective is the identity."""

    rank = 0
    world = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """The one rank's value."""
        return [value]


class GroupComm:
    """The ranks of the default process group, over CPU tensors (gloo)."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums in float64; every rank gives the same number of values."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima in float64; every rank gives the same number of values."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return [float(x) for x in tensor.tolist()]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over ranks."""
        dist.all_reduce(tensor)
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([data.numel()]))
        lengths = [int(s) for s in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded)
        return [json.loads(p[:n].numpy().tobytes().decode()) for p, n in zip(parts, lengths, strict=True)]
