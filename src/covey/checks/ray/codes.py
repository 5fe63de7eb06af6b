"""The codes of Ray that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E388",
        title="Ray that cannot be used",
        why="With --launcher ray, each rank is started as an actor of Ray. The run cannot start "
        "without a Ray cluster that accepts these actors.",
    ),
    Code(
        code="E389",
        title="Too few GPUs or CPUs in Ray",
        why="Each rank is one actor and needs its own GPU, or a CPU if Ray has no GPUs. Ray would "
        "wait forever for the missing ones.",
    ),
)
