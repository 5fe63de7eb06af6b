"""What a run says: everything to its files, a thinned copy to the terminal and the trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.comm import Comm, failing_together
from covey.health.record import fields_of
from covey.options.output import OutputOptions
from covey.plan.words import coded, sentence
from covey.rollout.collect import Collected
from covey.rollout.publisher import Published
from covey.rollout.records import conversation_text
from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles
from covey.telemetry.owner import Lock
from covey.telemetry.rollout_log import RolloutLog
from covey.telemetry.trackers.factory import Trackers
from covey.texts import tr
from covey.texts.language import spoken
from covey.training.failure import writing
from covey.types import Finding, Metric, StepRecord

Records = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Where a run is recorded. Each rank writes its own completions to `rollouts`; all other sinks are those
    of the first rank, and None on the others.
    """

    options: OutputOptions
    rollouts: RolloutLog
    comm: Comm
    files: RunFiles | None = None
    lock: Lock | None = None
    console: Console | None = None
    trackers: Trackers | None = None
    total_steps: int = 0
    _shown: tuple[Mapping[str, Any], ...] = ()
    _has_told_deletion: bool = False

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
        return writing(Path(self.options.output_dir), self.lock, step)

    def rollout(self, number: int, records: Callable[[], Records], *, step: int) -> None:
        """Record a rollout; `records` gives those of this rank and is called where they are needed.
        Collective.

        Raises RunFailed (F130, F132) on every rank where one of them cannot write.
        """
        is_written = self.rollouts.limits.includes(number)
        rows = records() if is_written or self.trackers is not None else []
        self._shown = tuple(_row(r) for r in rows[: self.options.log_completions])
        if is_written:
            with failing_together(self.comm), self.writing(step):
                self.rollouts.write(number, rows)
                oldest_kept = self.rollouts.oldest_kept()
            self._delete_old(oldest_kept, step)

    def _delete_old(self, oldest_kept: int, step: int) -> None:
        """Delete the rollouts that are too old for one of the ranks, on all of them; the first time is an
        event."""
        (oldest,) = self.comm.max([float(oldest_kept)])
        with failing_together(self.comm), self.writing(step):
            deleted = self.rollouts.delete_before(int(oldest))
        if deleted and not self._has_told_deletion:
            self._has_told_deletion = True
            names = [path.name for path in deleted]
            self.event("rollouts_deleted", step=step, files=names, max_gb=self.rollouts.limits.max_gb)

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Record an event."""
        if self.files is not None:
            with self.writing(step):
                self.files.append_event(kind, step=step, **fields)

    def finding(self, found: Finding, *, step: int) -> None:
        """Put a finding on record."""
        self.event("finding", step=step, **fields_of(found))

    def report(self, findings: Iterable[Finding], *, step: int) -> None:
        """Say and record what is unusual and stops nothing."""
        for found in findings:
            more = found.cause or found.why
            words = tr("{sentence} {cause}", sentence=sentence(found.seen), cause=more)
            self.say(*coded(found.code, words))
            self.finding(found, step=step)

    def published(self, every: Iterable[Published], *, step: int) -> None:
        """Write which weights the engine was given, and that it holds them."""
        for found in every:
            self.event(
                "published",
                step=step,
                version=found.version,
                digest=found.digest,
                tensors=found.num_tensors,
                bytes=found.num_bytes,
                seconds=found.seconds,
                canary_s=found.canary_s,
                canary_gap=found.canary_gap,
            )

    def selection(self, collected: Collected, rollout: int, *, step: int) -> None:
        """Write which rows of the data had groups that were left out, and why; the step is the first that
        learns from the others."""
        found = collected.selection
        if found is None or not (found.attempts or collected.stale or found.num_silent):
            return
        self.event(
            "groups_selected",
            step=step,
            rollout=rollout,
            attempts=found.attempts,
            dropped={why: list(rows) for why, rows in found.dropped.items()},
            replayed=len(collected.stale),
            without_signal=found.num_silent,
        )

    def evaluation(self, metrics: Mapping[str, Metric], *, step: int) -> None:
        """Put on record an evaluation that is no part of a step's record."""
        values = {name: metric.value for name, metric in metrics.items()}
        self.event("evaluated", step=step, **values)
        if self.trackers is not None:
            self.trackers.log(step, values)

    def say(self, *lines: str) -> None:
        """Show lines on the terminal."""
        if self.console is not None:
            for line in lines:
                self.console.say(spoken(line))

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.options.logging_steps == 0 or step == self.total_steps


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A completion as a row of a table."""
    parts: Sequence[Mapping[str, Any]] = record["parts"]
    return {
        "prompt": record["prompt"],
        "completion": conversation_text(record),
        "reward": record["reward"],
        **{f"rewards/{p['name']}": p["value"] for p in parts},
        "advantage": record["advantage"],
        "finish": record["finish"],
    }
