"""What a rule sees in a run at one step."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something unusual, in words; `badness` is how many times beyond its threshold it is, and `was_well` the
    last step whose rollout was as before, where that is known."""

    seen: str
    cause: str
    fixes: tuple[Fix, ...]
    badness: float
    was_well: int | None = None
