"""Codes of hangs."""

from __future__ import annotations

HANGS: tuple[tuple[str, str, str], ...] = (
    (
        "F301",
        "No progress",
        "The run would hang and keep its devices until somebody ends it. covey writes the stacks of all "
        "processes and ends the run.",
    ),
    (
        "F302",
        "Ranks that are about to do different things",
        "Each rank would wait for the others in a collective operation that never ends, or they would add "
        "up values that do not belong together.",
    ),
    (
        "F303",
        "No running process found",
        "Only a process that is training reports its state, and only to the user who owns the process.",
    ),
)
