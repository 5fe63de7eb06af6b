"""Evaluation: held-out prompts sampled under noise of their own, scored, and compared with the best so
far."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.checkpoint.registry import State
from covey.checks.evaluation.judge import pass_sizes
from covey.data.rows import taken
from covey.data.text import TextCodec
from covey.health.guards.outcomes import refuse_lost
from covey.health.guards.rollout import refuse_other_versions
from covey.health.rewards import refuse_no_numbers
from covey.rollout.collector import Collector
from covey.rollout.slots import CollectPlan
from covey.training.measure import id_metrics, length_metrics, reward_metrics, task_metrics, turn_metrics
from covey.types import Metric, Origin, Prompt, ScoredGroup

_NO_ORIGIN = Origin(epoch=0, rollout=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompts:
    """A named set of prompts."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one evaluation found; metric names begin with eval_, and with eval_<set>_ where there are
    several."""

    metrics: Mapping[str, Metric]
    groups: Mapping[str, tuple[ScoredGroup, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Samples and scores every prompt of every set; the same noise each time, and never training's.

    `rewards` names those that score a task.
    """

    sets: Sequence[EvalPrompts]
    collector: Collector
    plan: CollectPlan
    rewards: Mapping[str, Collection[str]] = field(default_factory=dict)

    def run(self) -> Evaluation:
        """Evaluate the current weights. Collective."""
        self.collector.comm.begin("evaluate")
        started, codec = time.perf_counter(), self.collector.codec
        groups = {s.name: self._collect(s) for s in self.sets}
        metrics: dict[str, Metric] = {}
        if len(groups) > 1:
            for name, found in groups.items():
                metrics |= _metrics(found, f"eval_{name}_", self.rewards, codec)
        everything = [g for found in groups.values() for g in found]
        metrics |= _metrics(everything, "eval_", self.rewards, codec)
        metrics["time/eval_s"] = Metric(value=time.perf_counter() - started)
        return Evaluation(metrics=metrics, groups=groups)

    def _collect(self, prompts: EvalPrompts) -> tuple[ScoredGroup, ...]:
        held_out = [taken(p, _NO_ORIGIN) for p in prompts.prompts]
        plan = replace(self.plan, split=f"eval/{prompts.name}")
        groups, step = self.collector.collect(held_out, plan).groups, self.collector.comm.activity.step
        refuse_lost(groups, step)
        refuse_no_numbers(groups, step)
        refuse_other_versions(groups, step)
        return groups


def _metrics(
    groups: Sequence[ScoredGroup], prefix: str, rewards: Mapping[str, Collection[str]], codec: TextCodec
) -> dict[str, Metric]:
    episodes = [e for g in groups for e in g.group.episodes]
    found = {**reward_metrics(groups), **length_metrics(episodes), **_pass_at_k(groups)}
    found |= {**turn_metrics(episodes), **id_metrics(episodes, codec)}
    for task in sorted({g.group.prompt.task for g in groups} - {""}):
        found |= task_metrics(groups, {task: rewards.get(task, ())})
        passes = _pass_at_k([g for g in groups if g.group.prompt.task == task])
        found |= {f"tasks/{task}/{name}": metric for name, metric in passes.items()}
    if all(len(g.scores) == 1 for g in groups):
        # One completion has no spread, which is not a spread of 0.
        spreads = [n for n in found if n.rpartition("/")[2] in ("reward_std", "frac_reward_zero_std")]
        found |= dict.fromkeys(spreads, Metric(value=None, count=0))
    return {f"{prefix}{name}": metric for name, metric in found.items()}


def _pass_at_k(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Pass@k of the first reward that is 0 or 1 throughout, for powers of 2 up to the group size."""
    size = min(len(g.scores) for g in groups)
    names = [p.name for p in groups[0].scores[0].parts]
    for index in range(len(names)):
        values = [[s.parts[index].value for s in g.scores] for g in groups]
        if size > 1 and all(v in (0.0, 1.0) for row in values for v in row):
            right = [sum(v == 1.0 for v in row) for row in values]
            return {
                f"pass@{k}": Metric(
                    value=sum(pass_at_k(len(row), c, k) for row, c in zip(values, right, strict=True))
                    / len(values),
                    count=len(values),
                )
                for k in pass_sizes(size)
            }
    return {}


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The chance that k of `num` completions, drawn without replacement, hold one of the right ones.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374): `pass_at_k(4, 1, 2)` is 0.5.
    """
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


class Best:
    """The best evaluation so far, and how many there have been since. A stateful component.

    `is_owed`: the one of the newest step was stopped by a guard, and is made when the run goes on.
    """

    name = "best"

    def __init__(self, metric: str, *, greater_is_better: bool) -> None:
        self.metric = metric
        self._sign = 1.0 if greater_is_better else -1.0
        self.value: float | None = None
        self.step: int | None = None
        self.num_worse = 0
        self.is_owed = False

    def update(self, metrics: Mapping[str, Metric], step: int) -> bool:
        """Take an evaluation in; True where it is the best. One without the metric is none."""
        value = metrics[self.metric].value if self.metric in metrics else None
        if value is not None and (self.value is None or self._sign * (value - self.value) > 0):
            self.value, self.step, self.num_worse = value, step, 0
            return True
        self.num_worse += 1
        return False

    def state(self) -> State:
        """Value, step and count, and whether an evaluation is still to be made."""
        counts = {"step": self.step, "num_worse": self.num_worse, "is_owed": self.is_owed}
        return State(json={"value": self.value, **counts})

    def load_state(self, state: State) -> None:
        """Go on from them."""
        values: Any = state.json
        self.value, self.step, self.num_worse = values["value"], values["step"], values["num_worse"]
        # A checkpoint of an older version does not say.
        self.is_owed = values.get("is_owed", False)
