"""The evaluations of a run: when one is due, what is said of it, and whether it was the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from covey.options.output import EvaluationOptions
from covey.texts import tr
from covey.texts.numbers import told
from covey.training.evaluate import Best, Evaluator
from covey.training.limits import Limits
from covey.training.recorder import Recorder
from covey.types import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluates a run while it trains; `evaluator` is None where nothing is evaluated, and `steps_per_epoch`
    where the data have no end."""

    options: EvaluationOptions
    evaluator: Evaluator | None
    best: Best
    steps_per_epoch: int | None
    limits: Limits
    recorder: Recorder

    def begin(self, step: int) -> dict[str, Metric] | None:
        """Evaluate before the first step where that is asked for, and return the metrics; after a resume make
        the evaluation that a guard had stopped. Collective."""
        if self.evaluator is not None and self.options.eval_on_start and not step:
            metrics = self._run(self.evaluator, step)
            self.recorder.evaluation(metrics, step=step)
            return metrics
        if self.best.is_owed:
            self.recorder.evaluation(self.run(step)[0], step=step)
        return None

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step: the last one, and without epochs it alone. None is due
        where a program asks for them."""
        if self.options.eval_strategy == "asked":
            return False
        is_by_epoch = self.options.eval_strategy == "epoch"
        every = self.steps_per_epoch or 0 if is_by_epoch else self.options.eval_steps
        is_last = step >= self.limits.total_steps
        return self.evaluator is not None and (is_last or (every != 0 and step % every == 0))

    def run(self, step: int) -> tuple[Mapping[str, Metric], bool]:
        """Evaluate; return the metrics, and whether they are the best so far. Nothing without an evaluator.
        Collective.

        The run ends where `early_stopping_patience` evaluations in a row were no better.
        """
        if self.evaluator is None:
            return {}, False
        is_last, best = step >= self.limits.total_steps, self.best
        best.is_owed = True
        metrics = self._run(self.evaluator, step)
        best.is_owed = False
        is_best = best.update(metrics, step)
        patience = self.options.early_stopping_patience
        if patience is not None and best.num_worse >= patience and not is_last:
            self.limits.ended_by = tr(
                "{num_worse} evaluations without a better {metric} than {value} of step {step}",
                num_worse=best.num_worse,
                metric=best.metric,
                value=best.value,
                step=best.step,
            )
        return metrics, is_best

    def _run(self, evaluator: Evaluator, step: int) -> dict[str, Metric]:
        metrics = dict(evaluator.run().metrics)
        self.recorder.published(evaluator.collector.publisher.taken(), step=step)
        evaluator.collector.publisher.rest()
        shown = [n for n in metrics if n.endswith(("reward", "/mean")) or "pass@" in n]
        shown = [n for n in shown if "tasks/" not in n or n.endswith("reward")]
        numbers = {n: v for n in shown if (v := metrics[n].value) is not None}
        # With an offset a value is told as exactly as one without.
        values = ", ".join(f"{n} {told(v, v + 1)[0]}" for n, v in numbers.items())
        self.recorder.say(tr("eval      step {step}: {values}", step=step, values=values))
        return metrics
