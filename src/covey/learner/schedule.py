"""The learning rate as a pure function of the optimizer step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["constant", "constant_with_warmup", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A peak rate reached after `warmup_steps`, then held (`constant`) or brought to 0 at `total_steps`."""

    kind: Scheduler
    peak: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """The rate of the update number `step`, counted from 0, as transformers' schedulers give it."""
        if step < self.warmup_steps:
            return self.peak * step / max(1, self.warmup_steps)
        if self.kind in ("constant", "constant_with_warmup"):
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
