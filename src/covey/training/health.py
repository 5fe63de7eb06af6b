"""Judge a run by its guards and rules, rollout by rollout and step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.checkpoint.registry import State
from covey.codes import CODES
from covey.environments.agents import Notes
from covey.errors import GuardStop
from covey.health.rewards import RewardWatch
from covey.health.rules import Rules
from covey.rollout.collect import Collected
from covey.rollout.engine import Engine
from covey.texts import packed, tr, unpacked
from covey.training.guards import Guards
from covey.types import Batch, Finding, Severity, StepResult


@dataclass(slots=True, kw_only=True)
class Health:
    """Judges a run by rules, which compare it with its start, by its rewards, and by guards."""

    rules: Rules
    watch: RewardWatch
    guards: Guards
    notes: Notes | None = None
    _has_reported_fallback: bool = False

    @property
    def name(self) -> str:
        """`health`; checkpoints that lack it are of older versions."""
        return "health"

    def of_rollout(self, collected: Collected, engine: Engine, step: int) -> list[Finding]:
        """Return what is unusual in a rollout, in its rewards and in the engine. Collective."""
        found = [*self.watch.check(collected.sampled, step), *self._new_fallbacks(engine, step)]
        found += self._new_notes(step)
        return [*found, *engine.take_notices()]

    def _new_fallbacks(self, engine: Engine, step: int) -> list[Finding]:
        """Return what the engine of some rank does more slowly from now on, the first time. Collective."""
        own = engine.given_up
        (any_rank,) = self.guards.comm.max([float(bool(own))])
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
                step=step,
            )
        ]

    def _new_notes(self, step: int) -> list[Finding]:
        """Return what a scheduler of some rank asked for that is done in another way, once. Collective."""
        if self.notes is None:
            return []
        shares = self.guards.comm.gather_json([packed(words) for words in self.notes.take()])
        found = {unpacked(words): None for share in shares for words in share}
        return [
            Finding(
                code="W158",
                seen=tr("The scheduler: {words}.", words=words),
                why=CODES["W158"].why,
                cause="",
                severity=Severity.WARNING,
                step=step,
            )
            for words in found
        ]

    def stop_of(self, batch: Batch, result: StepResult, step: int, *, is_fresh: bool) -> GuardStop | None:
        """Return the stop of a guard that the step just taken breaks; None where all hold. Collective."""
        try:
            self.guards.check_step(batch, result, step, is_fresh=is_fresh)
        except GuardStop as stop:
            return stop
        return None

    def state(self) -> State:
        """Counts, streaks and series."""
        parts = {"rules": self.rules.state(), "rewards": self.watch.state(), "guards": self.guards.state()}
        return State(json=parts)

    def load_state(self, state: State) -> None:
        """Judge what comes as the stopped run would have."""
        values: Any = state.json
        self.rules.load_state(values["rules"])
        self.watch.load_state(values["rewards"])
        self.guards.load_state(values["guards"])
