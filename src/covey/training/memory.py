"""The seconds of a step, the memory that its phases take, and how far the forecast was from that."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from covey.codes import CODES
from covey.plan.disk import size
from covey.plan.memory import LIBRARIES, MemoryPlan
from covey.texts import tr
from covey.types import Finding, Metric, Severity

MOST_OVER = 0.15
"""How far a GPU may exceed its forecast before a warning, as a share of it."""

PHASES = ("rollout", "annotate", "update")
"""The phases of a step that are measured."""

_GIB = 2**30


@dataclass(slots=True)
class StepCost:
    """Measures what a step costs this process: its seconds, and the memory of its device at the end of each
    phase, on a GPU also the most within.

    On a CPU these are resident bytes, with Python and its libraries. A phase runs from one call of `end` to
    the next, or from `begin`.
    """

    device: torch.device
    forecast: MemoryPlan | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    _peak_bytes: int = 0
    _is_compared: bool = False
    _began: float = field(default_factory=time.perf_counter)

    def begin_step(self) -> None:
        """Begin a step, and its first phase."""
        self._began = time.perf_counter()
        self.begin()

    def seconds(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began

    def begin(self) -> None:
        """Begin a phase: what has been held until here is not of it."""
        self._peak_bytes = self._most()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def end(self, phase: str) -> None:
        """End a phase, and begin the next."""
        held = resident_bytes()
        if self.device.type == "cuda":
            held = torch.cuda.memory_allocated(self.device)
            self._set(phase, "peak_gib", torch.cuda.max_memory_allocated(self.device))
            self._set(phase, "reserved_gib", torch.cuda.memory_reserved(self.device))
        self._set(phase, "held_gib", held)
        self.begin()

    def _set(self, phase: str, name: str, num_bytes: int) -> None:
        self.metrics[f"memory/{phase}/{name}"] = Metric(value=num_bytes / _GIB)

    def _most(self) -> int:
        if self.device.type == "cuda":
            return max(self._peak_bytes, torch.cuda.max_memory_allocated(self.device))
        # Kilobytes, but bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def step_metrics(self) -> dict[str, Metric]:
        """Those of the phases, None for one that this process has not had; the most since it began, and how
        far the forecast is from that."""
        names = ("held_gib", "peak_gib", "reserved_gib") if self.device.type == "cuda" else ("held_gib",)
        absent = {f"memory/{phase}/{name}": Metric(value=None) for phase in PHASES for name in names}
        found = self._compared(0)
        return {
            **absent,
            **self.metrics,
            "memory/peak_gib": Metric(value=self._most() / _GIB),
            "memory/forecast_error": Metric(value=None if found is None else found.error),
        }

    def compare(self, step: int) -> Comparison | None:
        """How far the forecast was from the most that has been held, after the first step that this process
        takes; None after later ones, and without a forecast."""
        if self._is_compared:
            return None
        self._is_compared = True
        return self._compared(step)

    def _compared(self, step: int) -> Comparison | None:
        if self.forecast is None or not self.forecast.phases:
            return None
        return compared(self._most(), self.forecast, step, is_gpu=self.device.type == "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Bytes that were held at most and that were forecast, and what is to be said where a GPU holds more."""

    measured_bytes: int
    forecast_bytes: int
    finding: Finding | None = None

    @property
    def error(self) -> float:
        """The measured over the forecast, less 1."""
        return self.measured_bytes / self.forecast_bytes - 1


def compared(measured: int, plan: MemoryPlan, step: int, *, is_gpu: bool) -> Comparison:
    """Compare the most that a process held with its forecast: by tensors on a GPU, else with its
    libraries."""
    binding = plan.binding
    # Reward models are processes of their own.
    forecast = binding.num_bytes - binding.parts.get("reward models", 0) + (0 if is_gpu else LIBRARIES)
    found = Comparison(measured_bytes=measured, forecast_bytes=forecast)
    if not is_gpu or found.error <= MOST_OVER:
        return found
    seen = tr(
        "GPU memory reached {size} by the end of step {step}; the forecast was {forecast}, in the "
        "phase {name}",
        size=size(measured),
        step=step,
        forecast=size(forecast),
        name=binding.name,
    )
    finding = Finding(
        code="W176",
        seen=seen,
        why=CODES["W176"].why,
        cause=tr("The metrics memory/PHASE/peak_gib show which phase used it."),
        severity=Severity.WARNING,
        step=step,
    )
    return replace(found, finding=finding)


def resident_bytes() -> int:
    """The bytes of this process that are in the machine's memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
