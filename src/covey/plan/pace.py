"""How long a run takes, from what an earlier run of the same work on this machine has measured.

A step's time follows from the model, how it is computed, the prompts and the lengths of the completions, so
that all of these have to be the same. The number of completions may differ: within a factor of four the time
is taken to be in proportion to it, and the plan says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from covey.options.schema import FACTS, Config
from covey.plan.batch import BatchPlan
from covey.plan.facts import Facts, Measured
from covey.plan.shape import Shape, counted

SAME_WORK = tuple(name for name, facts in FACTS.items() if facts.sets_pace)
"""Options that a completion's time follows from; a reference (`beta` above 0) is looked at beside them."""

FARTHEST = 4
"""The factor between two numbers of completions up to which a time is taken to be in proportion to them."""

_FIRST_STEPS = 2
_FEWEST_ROLLOUTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The time of the optimizer steps that are ahead: without loading, evaluations and checkpoints."""

    steps: int
    step_s: float
    seconds: float
    is_scaled: bool
    measured: Measured

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return asdict(self)

    def in_words(self) -> list[str]:
        """Return the time, and what it rests on, as lines for people."""
        was = self.measured
        each = f"{was.completions_per_step:,} completions of {was.mean_length:.0f} tokens on average"
        seen = f"as measured in {was.path}, steps {was.first_step:,}–{was.last_step:,}, {each}"
        if self.is_scaled:
            seen = f"in proportion to {_seconds(was.step_s)} {seen}"
        whole = f"about {_duration(self.seconds)} for {counted(self.steps, 'step')}"
        return [
            f"{whole}, without evaluations and checkpoints: {_seconds(self.step_s)} a step,",
            seen,
        ]


def is_same_work(config: Config, facts: Facts, plan: Mapping[str, Any]) -> bool:
    """Return whether the run of a plan.json did, in as many processes on such a machine, what this run does.

    A KeyError or TypeError says that it is no plan.json.
    """
    options, batch, there = plan["options"], plan["batch"], plan["facts"]
    has_reference = config.beta > 0
    return (
        all(options[name] == getattr(config, name) for name in SAME_WORK)
        and (options["beta"] > 0) == has_reference
        and batch["num_processes"] == facts.num_processes
        and there["cuda"] == facts.cuda
        and there["nproc_available"] == facts.nproc_available
        and _is_here(there["layout"])
    )


def _is_here(layout: Mapping[str, Any] | None) -> bool:
    """Whether a plan was of the machine that it was made on; earlier ones say nothing there."""
    return layout is None or bool(layout["is_here"])


def measured(path: str, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Measured | None:
    """Return what the lines of a metrics.jsonl say of a step's time; None where there are too few.

    Counted are whole rollouts after the first steps: their median, since a step that begins with a rollout
    takes longer than one that does not. A KeyError, TypeError or ValueError says that these are no records.
    """
    batch = plan["batch"]
    per_rollout, per_step = int(batch["steps_per_rollout"]), int(batch["completions_per_step"])
    rollouts: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if int(record["step"]) > _FIRST_STEPS:
            rollouts[int(record["rollout"])].append(record)
    whole = [steps for steps in rollouts.values() if len(steps) == per_rollout]
    times = [math.fsum(float(record["time/step_s"]) for record in steps) for steps in whole]
    if len(times) < _FEWEST_ROLLOUTS or not all(0 < time < math.inf for time in times):
        return None
    counted_steps = [int(record["step"]) for steps in whole for record in steps]
    lengths = [float(steps[0]["completions/mean_length"]) for steps in whole]
    return Measured(
        path=path,
        first_step=min(counted_steps),
        last_step=max(counted_steps),
        step_s=median(times) / per_rollout,
        rollout_s=median(times),
        mean_length=fmean(lengths),
        completions_per_step=per_step,
        completions_per_rollout=int(batch["completions_per_rollout"]),
    )


def is_near(was: Measured, batch: BatchPlan | Shape) -> bool:
    """Return whether a time can be taken over to a batch, in proportion to its completions."""
    pairs = (
        (was.completions_per_step, batch.completions_per_step),
        (was.completions_per_rollout, batch.completions_per_rollout),
    )
    return all(max(pair) <= FARTHEST * min(pair) for pair in pairs)


def pace(facts: Facts, batch: BatchPlan) -> Pace | None:
    """Return the time of the steps that are ahead; None where no run of the same work is known."""
    was = facts.measured
    if was is None or not facts.layout.is_here or batch.total_steps is None or not is_near(was, batch):
        return None
    done = 0 if facts.resume is None else facts.resume.step or 0
    steps = batch.total_steps - done
    if steps < 1:
        return None
    rollout_s = was.rollout_s * batch.completions_per_rollout / was.completions_per_rollout
    step_s = rollout_s / batch.steps_per_rollout
    sizes = (was.completions_per_step, was.completions_per_rollout)
    return Pace(
        steps=steps,
        step_s=step_s,
        seconds=steps * step_s,
        is_scaled=sizes != (batch.completions_per_step, batch.completions_per_rollout),
        measured=was,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _duration(seconds: float) -> str:
    for unit, length, least in (("days", 86_400, 2), ("h", 3600, 1.5), ("min", 60, 1.5)):
        if seconds >= least * length:
            number = seconds / length
            return f"{number:.{0 if number >= 10 else 1}f} {unit}"
    return f"{max(1, round(seconds))} s"
