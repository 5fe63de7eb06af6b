"""What the learner works towards at each step: the loss, the credit, and numbers that change on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from covey.algorithm.loss_types.registry import loss_named
from covey.algorithm.losses import LossConfig
from covey.batching.needs import Needs
from covey.checkpoint.registry import State
from covey.learner.schedule import Schedule
from covey.options.algorithm import AlgorithmOptions
from covey.options.schema import Config, CreditOptions
from covey.training.loss import loss

ScheduleKind = Literal["linear", "cosine"]
SCHEDULED_OPTIONS = ("temperature", "beta", "epsilon", "entropy_coef")
"""The options that may change over the run, each with its _end and _schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSchedule:
    """A number that goes from `start` to `end` over the run, a pure function of the step."""

    start: float
    end: float
    kind: ScheduleKind = "linear"

    @classmethod
    def of(cls, name: str, config: Config) -> OptionSchedule:
        """Return the schedule of the option `name`."""
        start, end, kind = (getattr(config, name + part) for part in ("", "_end", "_schedule"))
        return cls(start=start, end=end, kind=kind)

    def at(self, step: int, total_steps: int) -> float:
        """The value of the step number `step`, counted from 0; `end` at the last one.

        `OptionSchedule(start=1.0, end=0.7).at(50, 101)` is 0.85.
        """
        done = min(1.0, step / max(1, total_steps - 1))
        if self.kind == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done


class EntropyBonus:
    """The weight of the entropy bonus, held so that the entropy stays at a target.

    `coef` moves by `entropy_coef_delta` within its bounds after each step, up where the entropy was at most
    `entropy_target`; the bonus is given only then. Source: Skywork-OR1 (arXiv:2505.22312).
    """

    name = "entropy_bonus"

    def __init__(self, options: AlgorithmOptions) -> None:
        self._options, self.coef, self.last = options, options.entropy_coef, 0.0

    @property
    def weight(self) -> float:
        """What the next step's loss takes."""
        return self.coef if self.last <= self._options.entropy_target else 0.0

    def observe(self, entropy: float | None) -> None:
        """Take in the mean entropy (nats) of a step over all ranks; None where nothing was forwarded."""
        if entropy is None:
            return
        options = self._options
        sign = 1.0 if entropy <= options.entropy_target else -1.0
        coef = max(options.entropy_coef_min, self.coef + sign * options.entropy_coef_delta)
        self.coef = min(options.entropy_coef_max, coef)
        self.last = entropy

    def state(self) -> State:
        """The weight and the entropy that it follows."""
        return State(json={"coef": self.coef, "last": self.last})

    def load_state(self, state: State) -> None:
        """Go on from there."""
        values: Any = state.json
        self.coef, self.last = values["coef"], values["last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Holds the loss, the credit and the learning rate of a run; `schedules` has those of temperature, beta,
    epsilon and entropy_coef that change, and `bonus` an adaptive weight."""

    credit: CreditOptions
    loss: LossConfig
    needs: Needs
    rate: Schedule
    total_steps: int
    schedules: Mapping[str, OptionSchedule] = field(default_factory=dict)
    bonus: EntropyBonus | None = None

    def loss_at(self, step: int) -> LossConfig:
        """The loss of the update number `step`, counted from 0."""
        changed: dict[str, Any] = {}
        if "epsilon" in self.schedules:
            changed["epsilon"] = self._at("epsilon", step)
            if loss_named(self.loss.loss_type).is_clipped:
                changed["epsilon_high"] = self.loss.epsilon_high * changed["epsilon"] / self.loss.epsilon
        if "beta" in self.schedules and not self.credit.kl_in_reward:
            changed["beta"] = self._at("beta", step)
        if "entropy_coef" in self.schedules:
            changed["entropy_coef"] = self._at("entropy_coef", step)
        if self.bonus is not None:
            changed["entropy_coef"] = self.bonus.weight
        return replace(self.loss, **changed) if changed else self.loss

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the update number `step`."""
        return self.rate.at(step)

    def credit_at(self, step: int) -> CreditOptions:
        """How the rewards of a rollout that `step` begins with become advantages."""
        if "beta" not in self.schedules or not self.credit.kl_in_reward:
            return self.credit
        return self.credit.model_copy(update={"beta": self._at("beta", step)})

    def temperature_at(self, step: int) -> float | None:
        """The temperature of a rollout that `step` begins with; None where it does not change."""
        return self._at("temperature", step) if "temperature" in self.schedules else None

    def values_at(self, step: int) -> dict[str, float]:
        """What changes on the way, for the metrics."""
        values = {name: self._at(name, step) for name in self.schedules}
        return values if self.bonus is None else {**values, "entropy_coef": self.bonus.coef}

    def _at(self, name: str, step: int) -> float:
        return self.schedules[name].at(step, self.total_steps)


def objective_of(config: Config, needs: Needs, total_steps: int) -> Objective:
    """Return the objective that the options ask for."""
    changing = [name for name in SCHEDULED_OPTIONS if getattr(config, f"{name}_end") is not None]
    return Objective(
        credit=config,
        loss=loss(config),
        needs=needs,
        rate=Schedule(config, total_steps),
        total_steps=total_steps,
        schedules={name: OptionSchedule.of(name, config) for name in changing},
        bonus=EntropyBonus(config) if config.use_adaptive_entropy else None,
    )
