"""A slow oracle of sampling filters: float64, one token after the other, as their definition reads."""

from __future__ import annotations

import math
from collections.abc import Sequence


def kept_slowly(logit_V: Sequence[float], top_p: float, top_k: int, min_p: float) -> list[int]:
    """The ids that filters leave of logits behind the temperature, ascending."""
    logits = [float(value) for value in logit_V]
    left = [token for token, value in enumerate(logits) if value > -math.inf]
    if min_p > 0:
        least = max(logits) + math.log(min_p)
        left = [token for token in left if logits[token] >= least]
    if 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        left = [token for token in left if logits[token] >= kth]
    if top_p < 1:
        largest = max(logits)
        mass = {token: math.exp(logits[token] - largest) for token in left}
        total = math.fsum(mass.values())
        kept, before = [], 0.0
        for token in sorted(left, key=lambda token: (-logits[token], token)):
            if before >= top_p * total:
                break
            kept.append(token)
            before += mass[token]
        left = kept
    return sorted(left)
