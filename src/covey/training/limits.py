"""The limits and signals that end a run at or before its last planned step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from covey.comm import Comm
from covey.options.training import RunOptions
from covey.texts import tr


@dataclass(slots=True, kw_only=True)
class Signals:
    """The signal that this process got, and the one that all ranks have agreed to end for.

    A handler sets `received` at any moment. The ranks agree on `agreed` at three moments: before the first
    rollout, when a rollout is dropped, and after each step. A rank that ended for what it alone had seen
    would leave the others waiting. One that wrote back what the others had seen would lose a signal that came
    in between.
    """

    received: int = 0
    agreed: int = 0


@dataclass(slots=True, kw_only=True)
class Limits:
    """Says where a run ends: at its planned steps, at an early stop, for a signal, for minutes on the clock,
    or for what `ended_by` says."""

    options: RunOptions
    total_steps: int
    comm: Comm
    signals: Signals = field(default_factory=Signals)
    ended_by: str = ""
    _started: float = field(default_factory=time.perf_counter)

    def are_reached(self, step: int) -> bool:
        """Whether every planned step is taken, or something else ends the run; `ended_by` says what."""
        if step >= self.total_steps or self.signals.agreed or self.ended_by:
            return True
        return self.options.stop_after_steps is not None and step >= self.options.stop_after_steps

    def agree(self) -> None:
        """Stop all ranks after the same step for a signal or a clock that one of them saw. Collective."""
        minutes = (time.perf_counter() - self._started) / 60
        limit = self.options.max_minutes
        late = float(limit is not None and minutes >= limit)
        number, is_late = self.comm.max([float(self.signals.received), late])
        self.signals.agreed = int(number)
        if is_late:
            self.ended_by = tr("max_minutes {limit:g}", limit=limit)
