"""The codes of measured pass rates that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E349",
        title="No row within the pass rates",
        why="There is nothing left to train on.",
    ),
    Code(
        code="W127",
        title="Few rows have pass rates",
        why="A row without a pass rate is kept and placed in the middle of the order, whatever its "
        "true pass rate is.",
    ),
)
