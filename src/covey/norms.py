"""Norms of large tensors.

torch adds the squares of a float32 tensor on a CPU one after the other in float32, and small squares
are lost: the norm of 28 million Gaussian numbers is 0.15 % too low, that of 200 million 3 %. A
GPU adds them as a tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Numbers whose squares are added up in float32.
_ROW = 1 << 10


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all elements of tensors on one device: on a CPU in float64, chunk by chunk; on a
    GPU as torch computes it. It is not finite if an element is not finite, and 0 without elements."""
    held = [tensor.detach() for tensor in tensors]
    if any(tensor.device.type != "cpu" for tensor in held):
        return nn.utils.get_total_norm(held)
    return sum(map(_square, held), torch.zeros((), dtype=torch.float64)).sqrt()


def _square(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    return rows.double().square().sum() + flat[whole:].double().square().sum()
