"""What can be said of a tensor without keeping it: a sum of its bits, and whether it is finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covey.learner.optimizer import Across
from covey.models.policy import Policy
from covey.models.quantized import bytes_of, is_packed

MODULUS = 1 << 50
"""Checksums stay below it: those of shards are added up in integers of 64 bits, and compared in float64."""
# Numbers that are looked at together: what is made of them, in 8 bytes each, may be four times their size.
_PIECE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Sum of a tensor's bit patterns; equal tensors have equal ones on every machine."""
    bits = _BITS[tensor.element_size()]
    # Added up where the tensor is: what is kept of each part would stand between their memory.
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        total += piece.view(bits).sum(dtype=torch.int64)
    return int(total) % MODULUS


def whole_checksums(tensors: Mapping[str, Tensor], across: Across) -> list[int]:
    """Those of whole tensors, of which each rank holds a part. Collective."""
    if not tensors:
        return []
    sums = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64)
    return [value % MODULUS for value in across.sum(sums).tolist()]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor, a part at a time."""
    return tensor.detach().contiguous().view(-1).split(_PIECE)


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor is finite."""
    found = torch.ones((), dtype=torch.bool, device=tensor.device)
    for piece in _pieces(tensor):
        found &= torch.isfinite(piece).all()
    return bool(found)


def frozen_tensors(policy: Policy, reference: Policy | None) -> dict[str, Tensor]:
    """What no step may change of a policy and of a reference that stands still, by name; of packed weights
    their bytes and the constants that they are made with."""
    frozen: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            is_plain = not is_packed(parameter)
            frozen |= {name: parameter.detach()} if is_plain else bytes_of(name, parameter)
    still = {} if reference is None else dict(reference.named_parameters())
    return {**frozen, **{f"reference {n}": p.detach() for n, p in still.items()}}
