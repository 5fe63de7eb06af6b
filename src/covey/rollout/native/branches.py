"""Which completions share a row of the cache: those of one prompt that have drawn the same tokens so far.

What follows from their tokens is computed once for all of them; only their noise tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.rollout.native.rows import Row


@dataclass(slots=True)
class Branches:
    """The rows of the cache that are in use, as the completions that share each. The first ones are in use.

    Without `may_share` every completion has a row of its own: a stride of several tokens draws different ones
    before the host looks.
    """

    may_share: bool
    held: list[list[Row]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Every running completion; those that share a row are neighbours."""
        return [row for branch in self.held for row in branch]

    def start(self, rows: Sequence[Row]) -> list[Row]:
        """Add completions that have drawn their first token; returns one of each new row of the cache."""
        fresh: dict[object, list[Row]] = {}
        for row in rows:
            key = (row.family.slot, row.tokens[-1]) if self.may_share else row.id
            fresh.setdefault(key, []).append(row)
        self.held += fresh.values()
        return [branch[0] for branch in fresh.values()]

    def part(self) -> tuple[list[int], list[int]]:
        """Follow what was drawn: completions that ended leave, those that drew other tokens part. Returns
        which rows of the cache have to be copied, and whereto; none of them is both."""
        holes: list[int] = []
        fresh: list[tuple[int, list[Row]]] = []
        for number, branch in enumerate(self.held):
            parts: dict[int, list[Row]] = {}
            for row in branch:
                if not row.has_ended:
                    parts.setdefault(row.tokens[-1], []).append(row)
            if not parts:
                holes.append(number)
                continue
            self.held[number], *others = parts.values()
            fresh += [(number, other) for other in others]
        sources, targets = [], []
        for number, (source, branch) in enumerate(fresh):
            sources.append(source)
            if number < len(holes):
                targets.append(holes[number])
                self.held[holes[number]] = branch
            else:
                targets.append(len(self.held))
                self.held.append(branch)
        moved = self._close(holes[len(fresh) :])
        return sources + moved[0], targets + moved[1]

    def _close(self, holes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Move the last rows into holes, so that the rows in use are the first ones."""
        remaining = len(self.held) - len(holes)
        targets = [hole for hole in holes if hole < remaining]
        gone = set(holes)
        sources = [number for number in range(remaining, len(self.held)) if number not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.held[target] = self.held[source]
        del self.held[remaining:]
        return sources, targets
