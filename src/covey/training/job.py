"""Everything a run is made of, and what happens around an optimizer step: records, checkpoints, reasons to
stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from covey.algorithm.losses import LossConfig
from covey.algorithm.needs import Needs
from covey.batching.credit import CreditConfig
from covey.batching.pack import PackPlan, pack
from covey.checkpoint.registry import Registry
from covey.checkpoint.retain import retain
from covey.checkpoint.write import write_checkpoint
from covey.comm import Comm
from covey.health.invariants import check_rewards, check_step
from covey.learner.backends.base import Backend
from covey.learner.schedule import Schedule
from covey.rollout.collect import Collected
from covey.rollout.engine import Engine
from covey.rollout.records import records_of
from covey.telemetry.console import Console
from covey.telemetry.files import RunFiles
from covey.training.measure import rollout_metrics, step_metrics
from covey.training.source import Source
from covey.training.state import Progress, RolloutBuffer
from covey.types import Batch, Finding, Metric, StepRecord, StepResult, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """When checkpoints are written and how many stay; `every` 0 saves only at the end."""

    every: int
    total_limit: int | None
    keep_trainer_state: int
    model_only: bool
    write_model: Callable[[Path], None]
    meta: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Signals:
    """Set by a signal handler, read between optimizer steps."""

    number: int = 0


@dataclass(slots=True, kw_only=True)
class Job:
    """The wired parts of one run. `files` and `console` are None on every rank but the first."""

    source: Source
    engine: Engine
    backend: Backend
    credit: CreditConfig
    needs: Needs
    loss: LossConfig
    schedule: Schedule
    pack_plan: PackPlan
    comm: Comm
    registry: Registry
    progress: Progress
    buffer: RolloutBuffer
    total_steps: int
    stop_after: int | None
    save: SavePlan
    output_dir: Path
    files: RunFiles | None
    console: Console | None
    signals: Signals = field(default_factory=Signals)
    saved_step: int = -1
    _clock: float = field(default_factory=time.perf_counter)

    def is_done(self) -> bool:
        """Whether every planned step is taken, or the run was asked to end early."""
        if self.progress.step >= self.total_steps or self.signals.number:
            return True
        return self.stop_after is not None and self.progress.step >= self.stop_after

    def take_in(self, collected: Collected, rows: list[TrainSample]) -> None:
        """Start on a new rollout: measure it, write it, and keep it until its steps are done."""
        metrics = rollout_metrics(collected, rows, self.progress.step)
        check_rewards(collected.groups, self.progress.step)
        self.buffer.fill(rows, metrics)
        if self.files is not None:
            records = records_of(collected.groups)
            for record, row in zip(records, rows, strict=True):
                record["advantage"] = row.advantage
                record["masked"] = row.masked
            self.files.append_rollout(self.progress.rollout, records)

    def remaining_batches(self) -> list[Batch]:
        """The batches of the current rollout whose steps are not yet taken."""
        return pack(self.buffer.rows, self.pack_plan, self.progress.rollout)[self.buffer.done :]

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Count, check, record and publish one optimizer step, and save where one is due."""
        self.progress.step += 1
        self.progress.num_tokens += batch.denominators.num_tokens
        self.buffer.done += 1
        self.engine.publish(self.backend.named_weights(), self.progress.step)
        self._record(batch, result)
        self._agree_on_signals()
        if self.buffer.done == self.steps_per_rollout():
            self.buffer.clear()
            self.progress.rollout += 1
        check_step(batch, result, self.progress.step, self.comm)
        if self.save.every and self.progress.step % self.save.every == 0:
            self.save_checkpoint()

    def steps_per_rollout(self) -> int:
        """Optimizer steps of the current rollout over all its passes."""
        per_step = self.pack_plan.completions_per_rank * self.pack_plan.world
        return self.pack_plan.num_iterations * len(self.buffer.rows) // per_step

    def _record(self, batch: Batch, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        lengths = self.buffer.metrics["completions/mean_length"]
        tokens = (lengths.value or 0.0) * lengths.count / self.steps_per_rollout()
        metrics = {
            **self.buffer.metrics,
            **step_metrics(result),
            **{
                f"rows/dropped/{reason}": Metric(value=number, count=batch.denominators.num_sequences)
                for reason, number in batch.dropped.items()
            },
            "num_tokens": Metric(value=self.progress.num_tokens),
            "time/step_s": Metric(value=seconds),
            "throughput/tokens_per_s": Metric(value=tokens / seconds),
        }
        record = StepRecord(
            step=self.progress.step, rollout=batch.rollout, pass_index=batch.pass_index, metrics=metrics
        )
        if self.files is not None:
            self.files.append_metrics(record)
            if result.skipped:
                self.files.append_event("step_skipped", step=self.progress.step, reason=result.skipped)
        if self.console is not None:
            self.console.step(record)

    def stop(self, finding: Finding) -> None:
        """Record what a guard saw, and save: what it saw was not applied, or is in the records."""
        if self.files is not None:
            self.files.append_event("finding", step=self.progress.step, code=finding.code, seen=finding.seen)
        self.save_checkpoint()

    def _agree_on_signals(self) -> None:
        """A signal that one rank saw stops all of them after the same step."""
        if self.comm.world > 1:
            self.signals.number = int(self.comm.max([float(self.signals.number)])[0])

    def save_checkpoint(self) -> None:
        """Write `checkpoint-<step>` once, verify it, and let older ones go. Collective."""
        if self.saved_step == self.progress.step:
            return
        states = None if self.save.model_only else self.registry.states()
        self.saved_step = self.progress.step
        if self.files is None:
            return
        path = write_checkpoint(
            self.output_dir,
            step=self.progress.step,
            write_model=self.save.write_model,
            states=states,
            meta=self.save.meta,
        )
        self.files.append_event("saved", step=self.progress.step, path=path.name)
        for deletion in retain(
            self.output_dir,
            total_limit=self.save.total_limit,
            keep_trainer_state=self.save.keep_trainer_state,
            protected=(),
        ):
            self.files.append_event(
                "deleted", step=self.progress.step, path=str(deletion.path.relative_to(self.output_dir))
            )
