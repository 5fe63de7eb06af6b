"""Everything a run is made of, and what happens around an optimizer step: records, evaluations, checkpoints,
reasons to stop."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.activity import Stopped
from covey.batching.pack import pack
from covey.batching.shares import step_slices
from covey.comm import Comm
from covey.data.text import TextCodec
from covey.errors import GuardStop
from covey.learner.backends.base import Backend
from covey.rollout.collect import Collected
from covey.rollout.publisher import Publisher
from covey.rollout.records import records_of
from covey.texts import tr
from covey.training.buffer import RolloutBuffer
from covey.training.evaluations import Evaluations
from covey.training.health import Health
from covey.training.hooks import Due, Hooks
from covey.training.kept_metrics import kept_metrics
from covey.training.limits import Limits
from covey.training.measure import publish_metrics, rollout_metrics, step_metrics, with_users
from covey.training.memory import StepCost
from covey.training.objective import Objective
from covey.training.recorder import Recorder
from covey.training.saving import Saver
from covey.training.scoring import Scoring
from covey.training.source import Source
from covey.training.state import Progress
from covey.types import Batch, Metric, StepRecord, StepResult, TrainSample

# Steps between full garbage collections, on every rank at once. A run makes next to no garbage, but the
# interpreter keeps lists of freed objects, which only such a collection empties.
_COLLECT_EVERY = 10


@dataclass(slots=True, kw_only=True)
class Job:
    """The wired parts of one run."""

    source: Source
    publisher: Publisher
    backend: Backend
    scoring: Scoring
    codec: TextCodec
    objective: Objective
    comm: Comm
    progress: Progress
    buffer: RolloutBuffer
    evaluations: Evaluations
    health: Health
    limits: Limits
    saver: Saver
    recorder: Recorder
    cost: StepCost
    hooks: Hooks

    def is_done(self) -> bool:
        """Whether every planned step is taken, or something else ends the run."""
        return self.limits.are_reached(self.progress.step)

    def begin(self) -> None:
        """Evaluate before the first step where that is asked for, and after a resume what a guard had
        stopped."""
        self.comm.activity.step = self.progress.step
        self.cost.begin()
        self.hooks.begin(self)
        first = self.evaluations.begin(self.progress.step)
        if first is not None:
            self.hooks.evaluated(first, self.progress.step)
            self.health.rules.check(StepRecord(step=0, rollout=-1, pass_index=0, metrics=first))
        self.limits.agree()

    def collect(self) -> Collected | None:
        """The next rollout; None where a signal ended it, and the run stands before it as if it had not been
        begun."""
        self.hooks.begin_step()
        try:
            collected = self.source.next(self.progress.rollout)
            self.publisher.rest()
            self.cost.end("rollout")
            return collected
        except Stopped:
            self.limits.agree()
            return None

    def start_rollout(self, collected: Collected, rows: list[TrainSample]) -> None:
        """Start on a new rollout: measure it, write it, and keep it until its steps are done."""
        self.cost.end("annotate")
        step = self.progress.step
        self.health.guards.check_rollout(collected, rows, step, self.progress.rollout)
        self.recorder.published(self.publisher.taken(), step=step)
        metrics = {
            **rollout_metrics(collected, rows, step, self.codec),
            **kept_metrics(collected.groups, self.comm),
            **({} if collected.is_replayed else publish_metrics(self.publisher.last)),
        }
        self.recorder.report(self.health.of_rollout(collected, self.publisher.engine, step), step=step)
        self.buffer.fill(rows, metrics, self.scoring.take_metrics(self.progress.rollout, self.comm))
        records = partial(_records, collected, rows, self.comm.rank)
        self.recorder.rollout(self.progress.rollout, records, step=step)
        self.recorder.selection(collected, self.progress.rollout, step=step + 1)

    def remaining_batches(self) -> list[Batch]:
        """The batches of the current rollout whose steps are not yet taken."""
        batches = pack(self.buffer.rows, self.buffer.plan, self.progress.rollout, self.comm)[
            self.buffer.done :
        ]
        self.health.guards.check_batches(batches, self.buffer.rows, self.buffer.plan, self.progress.step)
        return batches

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Everything that follows an optimizer step, in this order."""
        self.cost.end("update")
        if result.skipped is None:
            self.hooks.after_optimizer()
        is_fresh = self.buffer.done == 0
        scheduled = self._scheduled_values()
        self._count(batch, result)
        self._move_reference()
        self.limits.agree()
        step, seconds = self.progress.step, self.cost.seconds()
        stop = self.health.stop_of(batch, result, step, is_fresh=is_fresh)
        self._compare_forecast()
        record = self._step_record(batch, result, seconds, scheduled)
        # A step that a guard stops is recorded, and not evaluated first.
        is_best = False
        if stop is None:
            self.hooks.end_step(record, self._due(step))
            try:
                evaluated, is_best = self._evaluate_if_due(step)
                record = replace(record, metrics={**record.metrics, **evaluated})
            except GuardStop as raised:
                # The step is taken: it is recorded, and evaluated when the run goes on.
                stop = raised
        self.recorder.step(record, result.skipped)
        self.recorder.report(self.health.rules.check(record), step=step)
        self._finish_rollout_if_done()
        if stop is not None:
            raise stop
        self._save_if_due(step, is_best=is_best)
        self._end_epoch(step)
        self._begin_next_step()

    def _due(self, step: int) -> Due:
        """Return what follows a step by the options."""
        return Due(evaluate=self.evaluations.is_due(step), save=self.saver.is_due(step) or self.is_done())

    def _is_asked(self, what: str) -> bool:
        """Whether something follows on any rank. Collective where ranks may ask for different things."""
        is_own = getattr(self.hooks.due, what)
        return bool(self.comm.max([float(is_own)])[0]) if self.hooks.may_ask else is_own

    def _evaluate_if_due(self, step: int) -> tuple[Mapping[str, Metric], bool]:
        """Evaluate where that is asked for; the metrics, and whether they are the best so far. Collective."""
        if not self._is_asked("evaluate"):
            return {}, False
        metrics, is_best = self.evaluations.run(step)
        self.hooks.evaluated(metrics, step)
        return metrics, is_best

    def _save_if_due(self, step: int, *, is_best: bool) -> None:
        """End the run where that is asked for; save where that is, and after the best evaluation where it is
        kept. A program learns of the last checkpoint before it does of the epoch's end. Collective."""
        if self._is_asked("stop"):
            self.limits.ended_by = self.limits.ended_by or tr("a callback")
        is_kept = is_best and self.saver.options.load_best_model_at_end
        is_last = self.hooks.may_ask and self.is_done()
        if (self._is_asked("save") or is_kept or is_last) and self.saver.save(step):
            self.hooks.saved()

    def _end_epoch(self, step: int) -> None:
        """Tell the program that the step is done, and do what it asks for then. Collective."""
        self.hooks.end_epoch(is_last=self.is_done() or self._is_asked("stop"))
        evaluated, is_best = self._evaluate_if_due(step)
        if evaluated:
            self.recorder.evaluation(evaluated, step=step)
        self._save_if_due(step, is_best=is_best)

    def end(self) -> None:
        """Save the last step, where that is not done, and tell the program that the run has ended."""
        if self.saver.save(self.progress.step):
            self.hooks.saved()
        self.hooks.end()

    def _compare_forecast(self) -> None:
        """After the first step put on record how far the forecast of the memory was off."""
        found = self.cost.compare(self.progress.step)
        if found is None:
            return
        numbers = {"measured_bytes": found.measured_bytes, "forecast_bytes": found.forecast_bytes}
        self.recorder.event("memory_forecast", step=self.progress.step, **numbers)
        self.recorder.report([] if found.finding is None else [found.finding], step=self.progress.step)

    def _scheduled_values(self) -> dict[str, Metric]:
        """The options that change over the run, as the step just taken had them."""
        values = self.objective.values_at(self.progress.step)
        return {name: Metric(value=value) for name, value in values.items()}

    def _count(self, batch: Batch, result: StepResult) -> None:
        """Count the step, and let an adaptive bonus see its entropy."""
        if self.objective.bonus is not None and "entropy" in result.metrics:
            self.objective.bonus.observe(result.metrics["entropy"].value)
        self.progress.step += 1
        self.progress.num_tokens += batch.denominators.num_tokens
        self.buffer.done += 1
        self.comm.activity.step = self.progress.step

    def _move_reference(self) -> None:
        """Move a reference that follows the policy, where its sync is due."""
        self.comm.activity.enter("publish")
        if self.backend.move_reference(self.progress.step):
            self.recorder.event("reference_moved", step=self.progress.step)

    def _finish_rollout_if_done(self) -> None:
        """Drop the rows of a rollout whose last step is taken."""
        if self.buffer.done == self.steps_per_rollout():
            self.buffer.clear()
            self.progress.rollout += 1
            self.progress.began = self.progress.step

    def _begin_next_step(self) -> None:
        self.cost.begin_step()
        if self.progress.step % _COLLECT_EVERY == 0:
            gc.collect()

    def steps_per_rollout(self) -> int:
        """Optimizer steps of the current rollout over all its passes."""
        samples = [row.annotated.sample for row in self.buffer.rows]
        return self.buffer.plan.num_iterations * len(step_slices(samples, self.buffer.plan))

    def _step_record(
        self, batch: Batch, result: StepResult, seconds: float, scheduled: Mapping[str, Metric]
    ) -> StepRecord:
        lengths = self.buffer.metrics["completions/mean_length"]
        tokens = (lengths.value or 0.0) * lengths.count / self.steps_per_rollout()
        metrics = {
            **self.buffer.metrics,
            **step_metrics(result),
            **{
                f"rows/dropped/{reason}": Metric(value=number, count=batch.num_rows)
                for reason, number in batch.dropped.items()
            },
            "num_tokens": Metric(value=self.progress.num_tokens),
            "time/step_s": Metric(value=seconds),
            "throughput/tokens_per_s": Metric(value=tokens / seconds),
            **self.cost.step_metrics(),
            **scheduled,
        }
        if self.backend.moving is not None and self.backend.moving.moves:
            last = self.backend.moving.last_sync(self.progress.step)
            metrics["reference/last_sync"] = Metric(value=last)
        return StepRecord(
            step=self.progress.step,
            rollout=batch.rollout,
            pass_index=batch.pass_index,
            metrics=with_users(metrics, self.buffer.logged),
        )

    def close(self) -> None:
        """Let go of what must end before the process group does."""
        self.source.close()
        self.publisher.engine.close()
        self.backend.close()


def _records(collected: Collected, rows: Sequence[TrainSample], rank: int) -> list[dict[str, Any]]:
    """One record for each completion that this rank has collected, for the files of rollouts, with what it
    was trained with. The first rank has those that every rank has read."""
    records = records_of(collected.groups, rank)
    by_place = {(r["group"], r["sibling"]): r for r in records}
    for row in rows:
        sample = row.annotated.sample
        record = by_place.get((sample.group, sample.sibling))
        if record is not None and sample.sequence == 0:
            record["advantage"] = row.advantage
            record["masked"] = row.masked
            if sample.age:
                record["age"] = sample.age
    return records
