"""What a run says: everything to its files, a thinned copy to the terminal and the trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles
from covey.telemetry.owner import Lock
from covey.telemetry.trackers.factory import Trackers
from covey.texts.language import spoken
from covey.training.failure import writing
from covey.types import StepRecord

Records = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Recorder:
    """The sinks of the first rank; on the others every sink is None and nothing is recorded.

    `every` is logging_steps and `num_shown` the completions of a tracker's table.
    """

    files: RunFiles | None = None
    lock: Lock | None = None
    console: Console | None = None
    trackers: Trackers | None = None
    every: int = 1
    total_steps: int = 0
    num_shown: int = 0
    _shown: tuple[Mapping[str, Any], ...] = ()

    def step(self, record: StepRecord, skipped: str | None) -> None:
        """Record one optimizer step."""
        if self.files is not None:
            with self.writing(record.step):
                self.files.append_metrics(record)
                if skipped:
                    self.files.append_event("step_skipped", step=record.step, reason=skipped)
        if self.console is not None:
            self.console.step(record)
        if self.trackers is not None and self._is_due(record.step):
            values = {
                name: metric.value for name, metric in record.metrics.items() if metric.value is not None
            }
            self.trackers.log(record.step, values)
            if self._shown:
                self.trackers.table(record.step, "completions", self._shown)

    def writing(self, step: int) -> AbstractContextManager[None]:
        """Write to the run directory; RunFailed (F130, F132) where it cannot be, or is another one by now."""
        assert self.files is not None
        return writing(self.files.output_dir, self.lock, step)

    def rollout(self, number: int, records: Callable[[], Records], *, step: int) -> None:
        """Record a rollout; `records` is called where there is a file to write them to."""
        if self.files is None:
            return
        rows = records()
        with self.writing(step):
            self.files.append_rollout(number, rows)
        self._shown = tuple(_row(r) for r in rows[: self.num_shown])

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Record an event."""
        if self.files is not None:
            with self.writing(step):
                self.files.append_event(kind, step=step, **fields)

    def say(self, *lines: str) -> None:
        """Show lines on the terminal."""
        if self.console is not None:
            for line in lines:
                self.console.say(spoken(line))

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0 or step == self.total_steps


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A completion as a row of a table."""
    parts: Sequence[Mapping[str, Any]] = record["parts"]
    return {
        "prompt": record["prompt"],
        "completion": record["text"],
        "reward": record["reward"],
        **{f"rewards/{p['name']}": p["value"] for p in parts},
        "advantage": record["advantage"],
        "finish": record["finish"],
    }
