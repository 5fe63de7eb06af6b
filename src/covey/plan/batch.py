"""The plan of a batch: what follows from its numbers, for people and for plan.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from covey.plan.shape import Shape
from covey.texts import counted, plural, tr


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A valid batch and what follows from it; None where the size of the data set is not known.

    `total_steps` are optimizer steps: max_steps where that is set, else as many whole rollouts as fit into
    num_train_epochs, each with `steps_per_rollout` steps. Rollouts never straddle two epochs, so an epoch
    leaves out `dropped_prompts_per_epoch` prompts, others each time if the data set is shuffled.
    """

    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int
    completions_per_step: int
    completions_per_rollout: int
    prompts_per_rollout: int
    steps_per_rollout: int
    on_policy: bool
    num_prompts: int | None
    rollouts_per_epoch: int | None
    steps_per_epoch: int | None
    dropped_prompts_per_epoch: int | None
    total_steps: int | None

    def equivalent_splits(self) -> tuple[tuple[int, int], ...]:
        """Return every (B, A) with the same product: the same run, with less or more memory per forward
        pass."""
        product = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return tuple((b, product // b) for b in range(1, product + 1) if product % b == 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plan.json holds it."""
        return asdict(self) | {"equivalent_splits": [list(split) for split in self.equivalent_splits()]}

    def in_words(self) -> list[str]:
        """Return the plan as lines for people."""
        rollout = tr(
            "1 rollout = {prompts} x {num_generations} completions = {completions_per_rollout} completions",
            prompts=counted(self.prompts_per_rollout, "prompt"),
            num_generations=self.num_generations,
            completions_per_rollout=self.completions_per_rollout,
        )
        prompts = Fraction(self.completions_per_step, self.num_generations)
        asked = plural(int(prompts != 1) + 1, "{n} prompt", "{n} prompts", n=_decimal(prompts))
        step = tr(
            "1 optimizer step = {processes} x {per_device_train_batch_size} completions x {passes} "
            "= {completions_per_step} completions = {asked}",
            processes=counted(self.num_processes, "process"),
            per_device_train_batch_size=self.per_device_train_batch_size,
            passes=counted(self.gradient_accumulation_steps, "forward pass"),
            completions_per_step=self.completions_per_step,
            asked=asked,
        )
        policy = "on-policy" if self.on_policy else tr("on samples of earlier weights too")
        if self.steps_per_rollout > 1:
            policy = tr("the later ones train on samples of an older policy")
        lines = [
            rollout,
            step,
            tr(
                "{steps} per rollout: {policy}",
                steps=counted(self.steps_per_rollout, "optimizer step"),
                policy=policy,
            ),
        ]
        if self.num_prompts is not None:
            lines.append(
                tr(
                    "1 epoch = {prompts} = {rollouts} = {steps}; {left} left over",
                    prompts=counted(self.num_prompts, "prompt"),
                    rollouts=counted(self.rollouts_per_epoch or 0, "rollout"),
                    steps=counted(self.steps_per_epoch or 0, "optimizer step"),
                    left=counted(self.dropped_prompts_per_epoch or 0, "prompt"),
                )
            )
        if self.total_steps is not None:
            lines.append(tr("the run = {steps}", steps=counted(self.total_steps, "optimizer step")))
        return lines


def plan_of(shape: Shape, num_prompts: int | None, num_train_epochs: float, max_steps: int) -> BatchPlan:
    """Return the plan of a valid shape."""
    prompts = shape.completions_per_rollout // shape.num_generations
    steps = shape.num_iterations * shape.steps_per_generation // shape.gradient_accumulation_steps
    rollouts = None if num_prompts is None else num_prompts // prompts
    return BatchPlan(
        num_processes=shape.num_processes,
        per_device_train_batch_size=shape.per_device_train_batch_size,
        gradient_accumulation_steps=shape.gradient_accumulation_steps,
        steps_per_generation=shape.steps_per_generation,
        num_generations=shape.num_generations,
        num_iterations=shape.num_iterations,
        completions_per_step=shape.completions_per_step,
        completions_per_rollout=shape.completions_per_rollout,
        prompts_per_rollout=prompts,
        steps_per_rollout=steps,
        on_policy=steps == 1,
        num_prompts=num_prompts,
        rollouts_per_epoch=rollouts,
        steps_per_epoch=None if rollouts is None else rollouts * steps,
        dropped_prompts_per_epoch=None if num_prompts is None else num_prompts % prompts,
        total_steps=_total_steps(rollouts, steps, num_train_epochs, max_steps),
    )


def _total_steps(rollouts_per_epoch: int | None, steps: int, epochs: float, max_steps: int) -> int | None:
    if max_steps > 0:
        return max_steps
    if rollouts_per_epoch is None:
        return None
    # As decimals, because 0.29 * 100 is below 29 in floating point.
    return int(Fraction(repr(epochs)) * rollouts_per_epoch) * steps


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4g}"
