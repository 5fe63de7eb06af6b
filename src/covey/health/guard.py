"""How a guard is declared, and what it sees at each moment of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.codes import Code
from covey.types import Batch, ScoredGroup, StepResult, TrainSample

if TYPE_CHECKING:
    from covey.batching.shares import PackPlan
    from covey.comm import Comm
    from covey.health.guards.invariants import StepFacts
    from covey.health.guards.rollout import RolloutFacts
    from covey.plan.step_refusals import StepRefusal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeen:
    """A rollout before anything is trained on it: `sampled` are all groups that were drawn for it, `groups`
    those that are trained, `rows` their rows."""

    sampled: Sequence[ScoredGroup]
    groups: Sequence[ScoredGroup]
    rows: Sequence[TrainSample]
    facts: RolloutFacts
    refusals: Sequence[StepRefusal]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesSeen:
    """The tensors of a rollout's optimizer steps before the first of them, whose number is `step`."""

    batches: Sequence[Batch]
    rows: Sequence[TrainSample]
    plan: PackPlan
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """An optimizer step that has been taken."""

    batch: Batch
    result: StepResult
    facts: StepFacts
    comm: Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Declares a guard, whose checks raise GuardStop (`covey.health.words.broken`).

    A variable of a file in `covey.health.guards` that holds one registers it. Each check is made on every
    rank, and what one rank finds stops all of them. Those with a lower `place` come first. `codes` are those
    that no other part uses; the others are in `covey.codes`.
    """

    of_rollout: Callable[[RolloutSeen], None] | None = None
    of_batches: Callable[[BatchesSeen], None] | None = None
    of_step: Callable[[StepSeen], None] | None = None
    place: int = 1000
    codes: tuple[Code, ...] = ()
