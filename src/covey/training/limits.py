"""The limits and signals that end a run at or before its last planned step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a run ends: its planned steps, an early stop, minutes on the clock, evaluations without gain."""

    total_steps: int
    stop_after: int | None = None
    max_minutes: float | None = None
    patience: int | None = None


@dataclass(slots=True, kw_only=True)
class Signals:
    """The signal that this process got, and the one that all ranks have agreed to end for.

    A handler sets the first, at any moment. The ranks agree on the second before the first rollout, where a
    rollout is dropped, and after each step. A rank that ended for what it alone had seen would leave the
    others waiting. One that wrote back what the others had seen would lose a signal that came in between.
    """

    received: int = 0
    agreed: int = 0
