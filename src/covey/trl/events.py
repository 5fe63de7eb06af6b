"""Tells the callbacks of transformers of a run, and the run what they ask for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from covey.errors import ProgramError
from covey.telemetry.files import read_metrics
from covey.texts import tr
from covey.texts.language import spoken
from covey.training.hooks import Due
from covey.types import Metric, StepRecord

if TYPE_CHECKING:
    from covey.training.job import Job
    from covey.trl.trainer import GRPOTrainer

# What is told as it is after the last step; of all else the mean over the steps since the last log.
_LAST = ("learning_rate", "grad_norm", "num_tokens")
# TRL's names of what has another name here.
_NAMES = {"time/step_s": "step_time"}


class Events:
    """Calls the callbacks of a trainer at the events of a run, in the order of transformers' trainer.

    There are no events of batches here: `on_substep_end` and `on_prediction_step` are never called.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._steps_per_epoch: int | None = None
        self._has_begun_epoch = self._has_begun_step = False
        self._since_log: list[dict[str, float]] = []
        self._losses: list[float] = []
        self._started = 0.0
        self._first_step = 0

    # A model of peft has its adapter beside it.
    adds_adapter = False

    @property
    def may_ask(self) -> bool:
        """Return whether there are callbacks."""
        return bool(self._trainer.callbacks)

    @property
    def due(self) -> Due:
        """Return what the control says."""
        control, job = self._trainer.control, self._trainer.job
        if control.should_evaluate and job is not None and job.evaluations.evaluator is None:
            words = tr("A callback asks for an evaluation, but eval_dataset is not given.")
            raise ProgramError from ValueError(spoken(words))
        return Due(
            evaluate=control.should_evaluate, save=control.should_save, stop=control.should_training_stop
        )

    def call(self, event: str, **extras: Any) -> None:
        """Call every callback; one may return a control that takes the place of the trainer's."""
        trainer, given = self._trainer, self._trainer.given
        for callback in trainer.callbacks:
            function = getattr(callback, event, None)
            if function is None:
                continue
            try:
                found = function(
                    trainer.args,
                    trainer.state,
                    trainer.control,
                    model=trainer.job.backend.policy.model if trainer.job else None,
                    processing_class=trainer.processing_class if trainer.job else given.processing_class,
                    optimizer=None,
                    lr_scheduler=None,
                    train_dataloader=None,
                    eval_dataloader=None,
                    **extras,
                )
            except (Exception, SystemExit) as error:
                if trainer.job is None:
                    raise
                raise ProgramError from error
            trainer.control = trainer.control if found is None else found
        if trainer.control.should_epoch_stop:
            words = tr("A callback set should_epoch_stop, which covey cannot do: use should_training_stop.")
            raise ProgramError from NotImplementedError(spoken(words))

    def begin(self, job: Job) -> None:
        """Begin with the state of the job; a resumed run has the logs of its earlier steps."""
        trainer, state = self._trainer, self._trainer.state
        trainer.job = job
        self._started, self._first_step = time.perf_counter(), job.progress.step
        self._steps_per_epoch = job.evaluations.steps_per_epoch
        self._count(job.progress.step)
        state.max_steps = job.limits.total_steps
        state.num_train_epochs = max(1, round(self._epoch(state.max_steps) + 0.499))
        state.log_history = list(self._earlier_logs(job.saver.output_dir))
        trainer.control.should_training_stop = False
        self.call("on_train_begin")

    def begin_step(self) -> None:
        """Begin an epoch, where none has begun, and a step."""
        if self._has_begun_step:
            return
        if not self._has_begun_epoch:
            self._has_begun_epoch = True
            self.call("on_epoch_begin")
        self._has_begun_step = True
        control = self._trainer.control
        control.should_log = control.should_evaluate = control.should_save = False
        self.call("on_step_begin")

    def before_optimizer(self) -> None:
        """Call on_pre_optimizer_step: the gradient is whole and not clipped."""
        self.call("on_pre_optimizer_step")

    def after_optimizer(self) -> None:
        """Call on_optimizer_step."""
        self.call("on_optimizer_step")

    def end_step(self, record: StepRecord, due: Due) -> None:
        """End a step, and log where that is due or asked for."""
        control = self._trainer.control
        self._has_begun_step = False
        self._take(record)
        self._count(record.step)
        control.should_log |= self._is_log_due(record.step)
        control.should_evaluate |= due.evaluate
        control.should_save |= due.save
        self.call("on_step_end")
        self._log_if_asked()

    def evaluated(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Log the metrics of an evaluation, and learn whether it is the best."""
        trainer, state = self._trainer, self._trainer.state
        values = {name: metric.value for name, metric in metrics.items() if metric.value is not None}
        trainer.log(values)
        trainer.control.should_evaluate = False
        self.call("on_evaluate", metrics=values)
        best = trainer.job.evaluations.best if trainer.job is not None else None
        if best is not None and best.step == step:
            state.best_metric, state.best_global_step = best.value, step
            state.best_model_checkpoint = str(trainer.job.saver.path(step)) if trainer.job else None

    def saved(self) -> None:
        """A checkpoint is written."""
        self._trainer.control.should_save = False
        self.call("on_save")

    def end_epoch(self, *, is_last: bool) -> None:
        """End the epoch with its last step, and with the last step of the run."""
        control, per_epoch = self._trainer.control, self._steps_per_epoch
        control.should_evaluate = control.should_save = False
        if is_last or (per_epoch and self._trainer.state.global_step % per_epoch == 0):
            self._has_begun_epoch = False
            self.call("on_epoch_end")
            self._log_if_asked()

    def end(self) -> None:
        """Log the run as a whole."""
        trainer = self._trainer
        seconds = time.perf_counter() - self._started
        num_steps = trainer.state.global_step - self._first_step
        assert trainer.job is not None
        num_rows = num_steps * trainer.job.comm.world * trainer.job.buffer.plan.completions_per_rank
        trainer.train_metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(num_rows / seconds, 3),
            "train_steps_per_second": round(num_steps / seconds, 3),
            "total_flos": 0.0,
            "train_loss": fmean(self._losses) if self._losses else 0.0,
        }
        trainer.log(dict(trainer.train_metrics))
        self.call("on_train_end")

    def _count(self, step: int) -> None:
        state = self._trainer.state
        state.global_step, state.epoch = step, self._epoch(step)

    def _epoch(self, step: int) -> float:
        """The epochs that steps are; of a stream the share of the run."""
        return step / (self._steps_per_epoch or max(1, self._trainer.state.max_steps))

    def _is_log_due(self, step: int) -> bool:
        args, every = self._trainer.args, self._trainer.args.logging_steps
        every = max(1, round(every * self._trainer.state.max_steps)) if 0 < every < 1 else every
        is_due = (args.logging_first_step and step == 1) or (every and step % every == 0)
        return bool(args.logging_strategy == "steps" and is_due)

    def _earlier_logs(self, output_dir: Path) -> Iterable[dict[str, float]]:
        """Yield the logs of the earlier steps of a resumed run, made from its metrics.jsonl."""
        path, last = output_dir / "metrics.jsonl", self._first_step
        for record in read_metrics(path) if last else ():
            if record.step > last:
                return
            evaluated = {n: m for n, m in record.metrics.items() if n.startswith("eval_")}
            own = {n: m for n, m in record.metrics.items() if n not in evaluated}
            self._take(replace(record, metrics=own))
            stamp = {"epoch": self._epoch(record.step), "step": record.step}
            if self._is_log_due(record.step):
                yield {**self._logs(), **stamp}
            if evaluated:
                yield {**{n: m.value for n, m in evaluated.items() if m.value is not None}, **stamp}
        self._losses = []

    def _take(self, record: StepRecord) -> None:
        values = {n: m.value for n, m in record.metrics.items() if m.value is not None}
        self._since_log.append({**values, **{_NAMES[n]: v for n, v in values.items() if n in _NAMES}})
        self._losses += [values["loss"]] if "loss" in values else []

    def _log_if_asked(self) -> None:
        if self._trainer.control.should_log and self._since_log:
            self._trainer.log(self._logs())
        self._trainer.control.should_log = False

    def _logs(self) -> dict[str, float]:
        """The metrics of the steps since the last log: means, and of some the last value."""
        found: dict[str, list[float]] = {}
        for values in self._since_log:
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        self._since_log = []
        return {n: values[-1] if n in _LAST else fmean(values) for n, values in found.items()}
