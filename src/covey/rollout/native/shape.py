"""How large a cache of the native engine is."""

from __future__ import annotations

from dataclasses import dataclass

# The share of the rows that are asked for with which a cache is as good as a new one.
_NEARLY = 7 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """How many rows and prefix slots a cache holds, and how long they are, in tokens.

    `flat`: a row's own slot has room for a copy of its prompt, which ends where the completion begins.
    """

    rows: int
    completion: int
    slots: int
    prompt: int
    flat: bool

    def serves(self, other: CacheShape) -> bool:
        """Whether a cache of this shape is as good as a new one for what `other` asks for: as long, and with
        nearly as many rows, since free memory varies a little from one rollout to the next."""
        return (
            self.flat == other.flat
            and self.completion >= other.completion
            and self.prompt >= other.prompt
            and self.rows >= _NEARLY * other.rows
            and self.slots >= _NEARLY * other.slots
        )

    def covering(self, other: CacheShape) -> CacheShape:
        """Return the smallest shape that covers both."""
        return CacheShape(
            rows=max(self.rows, other.rows),
            completion=max(self.completion, other.completion),
            slots=max(self.slots, other.slots),
            prompt=max(self.prompt, other.prompt),
            flat=self.flat,
        )
