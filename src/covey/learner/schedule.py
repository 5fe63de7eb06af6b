"""The learning rate as a pure function of the optimizer step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from covey.options.training import OptimizerOptions


@dataclass(frozen=True, slots=True)
class Schedule:
    """Raises the learning rate to its peak over the warmup steps, then holds it (`constant`) or brings it to
    0 at `total_steps`, or to the rate that lr_scheduler_kwargs has."""

    options: OptimizerOptions
    total_steps: int

    def at(self, step: int) -> float:
        """Return the rate of update number `step`, counted from 0, as transformers' schedulers give it."""
        options, peak = self.options, self.options.learning_rate
        warmup_steps = options.warmup_steps or round(options.warmup_ratio * self.total_steps)
        if step < warmup_steps:
            return peak * step / max(1, warmup_steps)
        if options.lr_scheduler_type in ("constant", "constant_with_warmup"):
            return peak
        done = (step - warmup_steps) / max(1, self.total_steps - warmup_steps)
        if options.lr_scheduler_type == "linear":
            return peak * max(0.0, 1.0 - done)
        share, lowest = 0.5 * (1.0 + math.cos(math.pi * done)), self._lowest()
        return peak * max(0.0, share * (1.0 - lowest) + lowest)

    def _lowest(self) -> float:
        """The share of the peak at which the schedule ends."""
        given = self.options.lr_scheduler_kwargs or {}
        if self.options.lr_scheduler_type != "cosine_with_min_lr" or not self.options.learning_rate:
            return 0.0
        return float(given.get("min_lr_rate", given.get("min_lr", 0.0) / self.options.learning_rate))
