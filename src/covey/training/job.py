"""Everything a run is made of, and what happens around an optimizer step: records, evaluations, checkpoints,
reasons to stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from covey.activity import Stopped
from covey.algorithm.needs import Needs
from covey.batching.pack import pack
from covey.batching.shares import step_slices
from covey.codes import CODES
from covey.comm import Comm
from covey.data.text import TextCodec
from covey.errors import GuardStop
from covey.health.record import fields_of
from covey.health.rewards import RewardWatch
from covey.health.rules import Rules
from covey.learner.backends.base import Backend
from covey.learner.schedule import Schedule
from covey.plan.words import coded, sentence
from covey.rollout.collect import Collected
from covey.rollout.engine import Engine
from covey.rollout.publisher import Publisher
from covey.rollout.records import records_of
from covey.texts import tr
from covey.texts.numbers import told
from covey.training.buffer import RolloutBuffer
from covey.training.evaluate import Best, EvalTimes, Evaluator
from covey.training.guards import Guards
from covey.training.kept_metrics import kept_metrics
from covey.training.limits import Limits, Signals
from covey.training.measure import publish_metrics, rollout_metrics, step_metrics, with_users
from covey.training.memory import PhaseMemory
from covey.training.objective import Objective
from covey.training.recorder import Recorder
from covey.training.saving import Saver
from covey.training.scoring import Scoring
from covey.training.source import Source
from covey.training.state import Progress
from covey.types import Batch, Finding, Metric, Severity, StepRecord, StepResult, TrainSample

# Steps between full garbage collections, on every rank at once. A run makes next to no garbage, but the
# interpreter keeps lists of freed objects, which only such a collection empties.
_COLLECT_EVERY = 10


@dataclass(slots=True, kw_only=True)
class Job:
    """The wired parts of one run. `evaluator` is None where nothing is evaluated."""

    source: Source
    engine: Engine
    publisher: Publisher
    backend: Backend
    scoring: Scoring
    codec: TextCodec
    objective: Objective
    needs: Needs
    schedule: Schedule
    comm: Comm
    progress: Progress
    buffer: RolloutBuffer
    limits: Limits
    evaluator: Evaluator | None
    eval_times: EvalTimes
    best: Best
    watch: RewardWatch
    guards: Guards
    rules: Rules
    saver: Saver
    recorder: Recorder
    memory: PhaseMemory
    signals: Signals = field(default_factory=Signals)
    ended_by: str = ""
    _has_reported_fallback: bool = False
    _step_began: float = field(default_factory=time.perf_counter)
    _started: float = field(default_factory=time.perf_counter)

    def is_done(self) -> bool:
        """Whether every planned step is taken, or something else ends the run; `ended_by` says what."""
        limits, step = self.limits, self.progress.step
        if step >= limits.total_steps or self.signals.agreed or self.ended_by:
            return True
        return limits.stop_after is not None and step >= limits.stop_after

    def begin(self) -> None:
        """Evaluate before the first step where that is asked for, and after a resume what a guard had
        stopped."""
        self.comm.activity.step = self.progress.step
        self.memory.begin()
        if self.evaluator is not None and self.eval_times.on_start and not self.progress.step:
            metrics = self._evaluate()
            self.rules.check(StepRecord(step=0, rollout=-1, pass_index=0, metrics=metrics))
            self._record_evaluation(metrics)
        elif self.best.is_owed:
            self._record_evaluation(self._evaluate_if_due()[0])
        self._agree_to_end()

    def _record_evaluation(self, metrics: Mapping[str, Metric]) -> None:
        """Put on record an evaluation that is no part of a step's record."""
        values = {name: metric.value for name, metric in metrics.items()}
        self.recorder.event("evaluated", step=self.progress.step, **values)
        if self.recorder.trackers is not None:
            self.recorder.trackers.log(self.progress.step, values)

    def collect(self) -> Collected | None:
        """The next rollout; None where a signal ended it, and the run stands before it as if it had not been
        begun."""
        try:
            collected = self.source.next(self.progress.rollout)
            self.publisher.rest()
            self.memory.end("rollout")
            return collected
        except Stopped:
            self._agree_to_end()
            return None

    def start_rollout(self, collected: Collected, rows: list[TrainSample]) -> None:
        """Start on a new rollout: measure it, write it, and keep it until its steps are done."""
        self.memory.end("annotate")
        self.guards.check_rollout(collected, rows, self.progress.step)
        self._record_published()
        metrics = {
            **rollout_metrics(collected, rows, self.progress.step, self.codec),
            **kept_metrics(collected.groups, self.comm),
            **({} if collected.is_replayed else publish_metrics(self.publisher.last)),
        }
        self._report([*self.watch.check(collected.sampled, self.progress.step), *self._new_fallbacks()])
        self._report(self.engine.take_notices())
        self.buffer.fill(rows, metrics, self.scoring.take_metrics(self.comm))
        records = partial(_records, collected, rows, self.comm.rank)
        self.recorder.rollout(self.progress.rollout, records, step=self.progress.step)
        self._record_selection(collected)

    def _record_published(self) -> None:
        """Write which weights the engine was given since the last call, and that it holds them."""
        for found in self.publisher.taken():
            self.recorder.event(
                "published",
                step=self.progress.step,
                version=found.version,
                digest=found.digest,
                tensors=found.num_tensors,
                bytes=found.num_bytes,
                seconds=found.seconds,
                canary_s=found.canary_s,
                canary_gap=found.canary_gap,
            )

    def _new_fallbacks(self) -> list[Finding]:
        """What the engine of some rank does more slowly from now on, the first time. Collective."""
        own = self.engine.given_up
        (any_rank,) = self.comm.max([float(bool(own))])
        if not any_rank or self._has_reported_fallback:
            return []
        self._has_reported_fallback = True
        return [
            Finding(
                code="W170",
                seen=own or tr("on another rank decoding continues without CUDA graphs, because one failed"),
                why=CODES["W170"].why,
                cause="",
                severity=Severity.WARNING,
                step=self.progress.step,
            )
        ]

    def _record_selection(self, collected: Collected) -> None:
        """Write which rows of the data had groups that were left out, and why; the step is the first that
        learns from the others."""
        found = collected.selection
        if found is None or not (found.attempts or collected.stale or found.num_silent):
            return
        self.recorder.event(
            "groups_selected",
            step=self.progress.step + 1,
            rollout=self.progress.rollout,
            attempts=found.attempts,
            dropped={why: list(rows) for why, rows in found.dropped.items()},
            replayed=len(collected.stale),
            without_signal=found.num_silent,
        )

    def remaining_batches(self) -> list[Batch]:
        """The batches of the current rollout whose steps are not yet taken."""
        batches = pack(self.buffer.rows, self.buffer.plan, self.progress.rollout, self.comm)[
            self.buffer.done :
        ]
        self.guards.check_batches(batches, self.buffer.rows, self.buffer.plan, self.progress.step)
        return batches

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Everything that follows an optimizer step, in this order."""
        self.memory.end("update")
        is_fresh = self.buffer.done == 0
        scheduled = self._scheduled_values()
        self._count(batch, result)
        self._move_reference()
        self._agree_to_end()
        seconds = time.perf_counter() - self._step_began
        stop = self._guard_stop(batch, result, is_fresh=is_fresh)
        self._compare_forecast()
        # A step that a guard stops is recorded, and not evaluated first.
        evaluated: Mapping[str, Metric] = {}
        is_best = False
        if stop is None:
            try:
                evaluated, is_best = self._evaluate_if_due()
            except GuardStop as raised:
                # The step is taken: it is recorded, and evaluated when the run goes on.
                stop = raised
        self._record(self._step_record(batch, result, seconds, {**scheduled, **evaluated}), result.skipped)
        self._finish_rollout_if_done()
        if stop is not None:
            raise stop
        self._save_if_due(is_best=is_best)
        self._begin_next_step()

    def _compare_forecast(self) -> None:
        """After the first step put on record how far the forecast of the memory was off."""
        found = self.memory.compare(self.progress.step)
        if found is None:
            return
        numbers = {"measured_bytes": found.measured_bytes, "forecast_bytes": found.forecast_bytes}
        self.recorder.event("memory_forecast", step=self.progress.step, **numbers)
        self._report([] if found.finding is None else [found.finding])

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

    def _guard_stop(self, batch: Batch, result: StepResult, *, is_fresh: bool) -> GuardStop | None:
        """The stop of a guard that the step just taken breaks; None where all hold. Collective."""
        try:
            self.guards.check_step(batch, result, self.progress.step, is_fresh=is_fresh)
        except GuardStop as stop:
            return stop
        return None

    def _record(self, record: StepRecord, skipped: str | None) -> None:
        """Write the record of a step, and report what the rules find unusual in it."""
        self.recorder.step(record, skipped)
        self._report(self.rules.check(record))

    def _finish_rollout_if_done(self) -> None:
        """Drop the rows of a rollout whose last step is taken."""
        if self.buffer.done == self.steps_per_rollout():
            self.buffer.clear()
            self.progress.rollout += 1
            self.progress.began = self.progress.step

    def _save_if_due(self, *, is_best: bool) -> None:
        """Save every `save_steps` steps, and after the best evaluation where it is kept."""
        plan = self.saver.plan
        is_due = plan.every != 0 and self.progress.step % plan.every == 0
        if is_due or (is_best and plan.keep_best):
            self.saver.save(self.progress.step)

    def _begin_next_step(self) -> None:
        self._step_began = time.perf_counter()
        self.memory.begin()
        if self.progress.step % _COLLECT_EVERY == 0:
            gc.collect()

    def steps_per_rollout(self) -> int:
        """Optimizer steps of the current rollout over all its passes."""
        samples = [row.annotated.sample for row in self.buffer.rows]
        return self.buffer.plan.num_iterations * len(step_slices(samples, self.buffer.plan))

    def _step_record(
        self, batch: Batch, result: StepResult, seconds: float, evaluated: Mapping[str, Metric]
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
            **self.memory.step_metrics(),
            **evaluated,
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

    def _evaluate_if_due(self) -> tuple[Mapping[str, Metric], bool]:
        """The metrics of an evaluation where one is due, and whether it is the best so far."""
        step = self.progress.step
        is_last = step >= self.limits.total_steps
        if self.evaluator is None or not (is_last or self.eval_times.is_due(step)):
            return {}, False
        self.best.is_owed = True
        metrics = self._evaluate()
        self.best.is_owed = False
        is_best = self.best.update(metrics, step)
        patience = self.limits.patience
        if patience is not None and self.best.num_worse >= patience and not is_last:
            self.ended_by = tr(
                "{num_worse} evaluations without a better {metric} than {value} of step {step}",
                num_worse=self.best.num_worse,
                metric=self.best.metric,
                value=self.best.value,
                step=self.best.step,
            )
        return metrics, is_best

    def _evaluate(self) -> dict[str, Metric]:
        assert self.evaluator is not None
        metrics = dict(self.evaluator.run().metrics)
        self._record_published()
        self.publisher.rest()
        shown = [n for n in metrics if n.endswith(("reward", "/mean")) or "pass@" in n]
        shown = [n for n in shown if "tasks/" not in n or n.endswith("reward")]
        numbers = {n: v for n in shown if (v := metrics[n].value) is not None}
        # With an offset a value is told as exactly as one without.
        values = ", ".join(f"{n} {told(v, v + 1)[0]}" for n, v in numbers.items())
        self.recorder.say(tr("eval      step {step}: {values}", step=self.progress.step, values=values))
        return metrics

    def _report(self, findings: Sequence[Finding]) -> None:
        """Say and record what is unusual and stops nothing."""
        for found in findings:
            more = found.cause or found.why
            words = tr("{sentence} {cause}", sentence=sentence(found.seen), cause=more)
            self.recorder.say(*coded(found.code, words))
            self.record_finding(found)

    def record_finding(self, found: Finding) -> None:
        """Put a finding on record."""
        self.recorder.event("finding", step=self.progress.step, **fields_of(found))

    def close(self) -> None:
        """Let go of what must end before the process group does."""
        self.engine.close()
        self.backend.close()

    def _agree_to_end(self) -> None:
        """A signal or a clock that one rank saw stops all of them after the same step."""
        minutes = (time.perf_counter() - self._started) / 60
        limit = self.limits.max_minutes
        late = float(limit is not None and minutes >= limit)
        number, is_late = self.comm.max([float(self.signals.received), late])
        self.signals.agreed = int(number)
        if is_late:
            self.ended_by = tr("max_minutes {limit:g}", limit=limit)


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
