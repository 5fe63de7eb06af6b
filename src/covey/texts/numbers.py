"""Numbers for texts, with enough digits to tell them apart."""

from __future__ import annotations

import math

_LEAST_DIGITS, _MOST_DIGITS = 3, 12


def told(*values: float, digits: int = 4) -> tuple[str, ...]:
    """The numbers as texts, with enough digits to tell them apart.

    `told(1000.2, 1001.4)` is ("1000.2", "1001.4").
    """
    known = [v for v in values if math.isfinite(v)]
    span = max(known, default=0.0) - min(known, default=0.0)
    if span > 0:
        needed = math.ceil(math.log10(max(abs(v) for v in known) / span)) + _LEAST_DIGITS
        digits = min(max(digits, needed), _MOST_DIGITS)
    return tuple(f"{v:.{digits}g}" for v in values)
