"""What a rule sees in a run at one step."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something unusual, in words; `badness` is how many times beyond its threshold it is."""

    seen: str
    cause: str
    fixes: tuple[Fix, ...]
    badness: float
