"""The guards of a run: every invariant as soon as it can first be seen, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from covey.algorithm.loss_types.registry import LossType
from covey.batching.shares import PackPlan, step_slices
from covey.comm import Comm, raise_on_all_ranks
from covey.config.start import starts_at_reference
from covey.errors import GuardStop
from covey.health.guard import BatchesSeen, RolloutSeen, StepSeen
from covey.health.guard_list import GUARDS
from covey.health.guards.batch import planned_loss
from covey.health.guards.invariants import EngineName, StepFacts
from covey.health.guards.rollout import RolloutFacts
from covey.health.weights import WeightWatch
from covey.health.words import broken
from covey.options.algorithm import AlgorithmOptions
from covey.options.schema import Config
from covey.plan.step_refusals import step_refusals
from covey.rollout.collect import Collected
from covey.texts import joined, tr
from covey.types import Batch, StepResult, TrainSample

Seen = TypeVar("Seen", RolloutSeen, BatchesSeen, StepSeen)

# Mean |logprob - sampler's logprob| that rounding explains. bfloat16: slime's gate of 0.1 between engines.
_GAP_FLOAT32 = 0.01
_GAP_LOW = 0.1
# Relative difference between two computations of a gradient, in the same forward passes, that rounding
# explains.
_MATCH_FLOAT32 = 1e-3
_MATCH_LOW = 5e-2
# Experts that no token was routed to have no gradient, nor has an adapter's A while its B is 0.
_UNROUTED = ("expert",)
_AFTER_B = ("lora_A", "lora_embedding_A", "lora_magnitude")


@dataclass(slots=True, kw_only=True)
class Guards:
    """Check every rollout, batch and step of a run; GuardStop from any method ends the run on every rank.

    With the option `guards` off they check nothing and keep the state that a resumed run with guards needs.
    """

    options: Config
    comm: Comm
    num_episodes: int
    plain_loss: LossType | None
    is_comparable: bool
    is_low_precision: bool
    engine: EngineName
    weights: WeightWatch
    max_age: int = 0
    untrained: tuple[str, ...] = ()
    may_be_silent: bool = False
    has_dropout: bool = False
    of_images: frozenset[str] = frozenset()
    only_images: bool = False
    _is_replayed: bool = True
    _has_moved: bool = False
    _has_seen: bool = False
    _is_behind: bool = False
    _planned_loss: tuple[float, float] | None = None
    _is_matched: bool = False

    @property
    def is_on(self) -> bool:
        """Whether the run is held to anything."""
        return self.options.guards

    def check_rollout(
        self, collected: Collected, rows: Sequence[TrainSample], version: int, rollout: int
    ) -> None:
        """Check the rollout of a number before anything is trained on it; `version` is the policy's."""
        self._is_replayed = collected.is_replayed
        if not self.is_on:
            return
        if self.untrained:
            raise broken(
                "F124",
                version + 1,
                tr(
                    "{num_untrained} tensors of the model are frozen: {untrained}",
                    num_untrained=len(self.untrained),
                    untrained=joined(", ", self.untrained[:3]),
                ),
                tr(
                    "They were frozen while the model was loaded; without an adapter every tensor must "
                    "be trainable, but for parts that freeze_vit, freeze_aligner or freeze_llm leaves out."
                ),
            )
        facts = RolloutFacts(
            step=version + 1,
            num_generations=self.options.num_generations,
            num_episodes=self.num_episodes,
            scaled_by=_scaled_by(self.options),
            is_over_rollout=self.options.advantage_estimator == "reinforce_plus_plus",
            version=None if collected.is_replayed else version,
            rollout=rollout,
            max_age=self.max_age,
            stale=collected.stale,
            makes_prompts=self.options.makes_prompts,
            starts_differ=self.options.environment_starts == "differ",
        )
        seen = RolloutSeen(
            sampled=collected.sampled,
            groups=collected.groups,
            rows=rows,
            facts=facts,
            refusals=step_refusals(self.options),
        )
        self._on_all_ranks([guard.of_rollout for guard in GUARDS], seen)

    def check_batches(
        self, batches: Sequence[Batch], rows: Sequence[TrainSample], plan: PackPlan, steps_done: int
    ) -> None:
        """Check the tensors of a rollout's steps before the first of them is taken."""
        if not self.is_on:
            return
        seen = BatchesSeen(batches=batches, rows=rows, plan=plan, step=steps_done + 1)
        self._on_all_ranks([guard.of_batches for guard in GUARDS], seen)
        first = [rows[i] for i in step_slices([r.annotated.sample for r in rows], plan)[0]]
        # The ratios of rows of an older policy are known to no plan.
        self._planned_loss = None
        if self.plain_loss is not None and not any(r.annotated.sample.age for r in first):
            self._planned_loss = planned_loss(first, self.plain_loss, plan.max_completion_length)

    def is_second_gradient_due(self, batch: Batch, *, is_fresh: bool) -> bool:
        """Whether this step's gradient is to be computed twice: the first of a run whose ratios are 1 and
        whose rows have signal. Collective."""
        if not self.is_on or self._is_matched or self.has_dropout or not (is_fresh and self.is_comparable):
            return False
        stale = any(m.age_N is not None for m in batch.micro_batches)
        has_signal, has_stale = self.comm.max([float(any(batch.has_signal)), float(stale)])
        return bool(has_signal) and not has_stale

    def check_step(self, batch: Batch, result: StepResult, step: int, *, is_fresh: bool) -> None:
        """Check an optimizer step that has been taken; `is_fresh` says that it is its rollout's first."""
        gap = _GAP_LOW if self.is_low_precision else _GAP_FLOAT32
        facts = StepFacts(
            step=step,
            # Where something is dropped, no two passes give a token the same probability.
            is_fresh=is_fresh and not self.has_dropout,
            is_start=step == 1 and starts_at_reference(self.options),
            sampler_gap=None if self._is_replayed else gap,
            gradient_gap=_MATCH_LOW if self.is_low_precision else _MATCH_FLOAT32,
            peak_rate=self.options.learning_rate,
            may_lack=_UNROUTED if self._has_moved else (*_UNROUTED, *_AFTER_B),
            loss=self._planned_loss,
            may_be_silent=self.may_be_silent,
            engine=self.engine,
            of_images=self.of_images,
            images_may_lack=() if self._has_seen else _AFTER_B,
            only_images=self.only_images,
            has_images=bool(self.of_images) and self._has_images(batch),
        )
        if self.is_on:
            seen = StepSeen(batch=batch, result=result, facts=facts, comm=self.comm)
            self._on_all_ranks([guard.of_step for guard in GUARDS], seen)
        self._is_matched |= result.match is not None
        stats = result.stats
        has_moved = stats is not None and stats.learning_rate > 0.0 and stats.grad_norm > 0.0
        self._has_moved |= has_moved
        self._has_seen |= stats is not None and has_moved and facts.sees(stats)
        self._is_behind |= stats is not None and stats.frac_params_changed > 0.0
        if self.options.sync_ref_model and step % self.options.ref_model_sync_steps == 0:
            if self.is_on:
                self.weights.check_sync(step, self.comm, is_behind=self._is_behind)
            self._is_behind = False
        if self.is_on:
            self.weights.check(step, self.comm)

    def check_before_save(self, step: int) -> None:
        """Check the weights of a step before they are written over older ones. Collective."""
        if self.is_on:
            self.weights.check_finite(step, self.comm)

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON."""
        found = {"has_moved": self._has_moved, "is_replayed": self._is_replayed}
        found |= {"has_seen": self._has_seen} if self.of_images else {}
        return {**found, "is_behind": self._is_behind} if self.options.sync_ref_model else found

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Hold the run to what held for the stopped one."""
        self._has_moved, self._is_replayed = values["has_moved"], values["is_replayed"]
        self._is_behind = values.get("is_behind", False)
        self._has_seen = values.get("has_seen", False)
        self.weights.record_reference()

    def _has_images(self, batch: Batch) -> bool:
        """Return whether a forward pass of any rank has an image, and an advantage for each of its tokens.
        Collective."""
        own = any(
            micro.media is not None and has_signal and bool((micro.advantage_N != 0).all())
            for micro, has_signal in zip(batch.micro_batches, batch.has_signal, strict=True)
        )
        return any(self.comm.max([float(own)]))

    def _on_all_ranks(self, checks: Iterable[Callable[[Seen], None] | None], seen: Seen) -> None:
        """Make each check on every rank. What one rank finds stops all of them; the first rank's finding is
        everyone's."""
        for check in checks:
            if check is None:
                continue
            found: GuardStop | None = None
            try:
                check(seen)
            except GuardStop as stop:
                found = stop
            raise_on_all_ranks(self.comm, found)


def _scaled_by(options: AlgorithmOptions) -> Literal["group", "rollout"] | None:
    """Return whose spread bounds the advantages."""
    if options.scale_rewards == "gdpo":
        return "rollout"
    units = {("grpo", "group"): "group", ("reinforce_plus_plus", "batch"): "rollout"}
    return units.get((options.advantage_estimator, options.scale_rewards))  # type: ignore[return-value]
