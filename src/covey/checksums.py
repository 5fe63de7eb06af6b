"""Checksums of tensors: a sum of their bits, and whether they are finite."""

from __future__ import annotations

import torch
from torch import Tensor

MODULUS = 1 << 50
"""Checksums stay below it: those of shards are added up in integers of 64 bits, and compared in float64."""
# Numbers that are looked at together: what is made of them, in 8 bytes each, may be four times their size.
_CHUNK = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bit patterns; equal tensors have equal ones on every machine."""
    bits = _BITS[tensor.element_size()]
    # Added up where the tensor is: what is kept of each part would stand between their memory.
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in _chunks(tensor):
        total += chunk.view(bits).sum(dtype=torch.int64)
    return int(total) % MODULUS


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of a tensor as flat chunks of at most `_CHUNK` each."""
    return tensor.detach().contiguous().view(-1).split(_CHUNK)


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor is finite."""
    found = torch.ones((), dtype=torch.bool, device=tensor.device)
    for chunk in _chunks(tensor):
        found &= torch.isfinite(chunk).all()
    return bool(found)
