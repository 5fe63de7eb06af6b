"""A quantile of values that are spread over ranks, exact to the bit, by counting."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covey.comm import Comm

# The bits of a float32 that each round settles, the highest first.
_ROUNDS = (11, 11, 10)


def exact_quantile(own: Tensor, share: float, comm: Comm) -> float | None:
    """Return the least of the `share` of all ranks' values that are the largest; None where all count.

    `own` (n,) are this rank's values, float32 on the CPU; a rank may have none. All count where `share` is 1
    or no rank has a value. Of n values in all it is the one that `kthvalue` of all of them gives for
    k = n - max(1, ceil(share x n)) + 1; NaN counts as the largest, and -0.0 is 0.0. Collective: three sums
    over ranks of at most 2,048 counts.
    """
    assert own.dtype is torch.float32 and own.dim() == 1, "float32 (n,)"
    if share >= 1.0:
        return None
    keys = _keys(own)
    prefix, shift, rank_from_top = 0, 32, 0
    for bits in _ROUNDS:
        shift -= bits
        digits = (keys >> shift) & (2**bits - 1)
        counts = comm.sum_tensor(torch.bincount(digits, minlength=2**bits))
        if shift + bits == 32:
            num_values = int(counts.sum())
            if num_values == 0:
                return None
            rank_from_top = max(1, math.ceil(share * num_values))
        # The digit with which the counts from the top reach the rank; what lies above it is done with.
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= rank_from_top).sum()) - 1
        rank_from_top -= int(at_least[digit] - counts[digit])
        prefix = (prefix << bits) | digit
        keys = keys[digits == digit]
    return _value(prefix)


def _keys(values: Tensor) -> Tensor:
    """Whole numbers of 32 bits, int64, in the order of the values."""
    # Adding 0 makes -0.0 the 0.0 that it equals; there is more than one NaN too.
    bits = torch.where(values.isnan(), torch.nan, values + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)


def _value(key: int) -> float:
    """The value of a key."""
    bits = key & 0x7FFFFFFF if key >> 31 else ~key & 0xFFFFFFFF
    return float(torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32))
