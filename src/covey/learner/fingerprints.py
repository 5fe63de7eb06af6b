"""Checksums of the tensors that a backend holds, whole or in shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covey.checksums import MODULUS, checksum
from covey.learner.optimizer import Reduction
from covey.models.policy import Policy
from covey.models.quantized import bytes_of, is_packed


def whole_checksums(tensors: Mapping[str, Tensor], reduction: Reduction) -> list[int]:
    """Return the checksums of whole tensors of which each rank holds a shard. Collective."""
    if not tensors:
        return []
    sums = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64)
    return [value % MODULUS for value in reduction.sum(sums).tolist()]


def frozen_tensors(policy: Policy, reference: Policy | None) -> dict[str, Tensor]:
    """Return the tensors of a policy and of a fixed reference that no step may change, by name; of packed
    weights their bytes and the constants that they are made with."""
    frozen: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            frozen |= bytes_of(name, parameter) if is_packed(parameter) else {name: parameter.detach()}
    still = {} if reference is None else dict(reference.named_parameters())
    return {**frozen, **{f"reference {n}": p.detach() for n, p in still.items()}}
