"""Faults of one of two processes: the other one is as it should be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from covey.batching import pack
from covey.data.order import Order
from covey.health.watchdog import Allowance
from covey.learner import optimizer, update
from covey.learner.backends.ddp import DDPBackend
from covey.training import loop, scoring, watch
from covey.types import Batch
from mutants import faults
from mutants.faults import Patch, Plant, before, changed
from mutants.faults_inputs import another_order, reward
from mutants.harness import Mutant, nothing

# The times of a phase are learned from its third visit on.
HANGS_AT = 3
# Named when the turn of the tensor comes that it is in.
_TURN = 2


def _after_steps(change: Callable[[Any], None]) -> Plant:
    """Change something of this rank's optimizer after each of its steps."""

    def plant(patch: Patch) -> None:
        real = optimizer.Masters.step

        def step(self: Any, *how: Any) -> Any:
            out = real(self, *how)
            with torch.no_grad():
                change(self)
            return out

        patch.setattr(optimizer.Masters, "step", step)

    return plant


def _one_weight(masters: Any) -> None:
    masters.params[_TURN].view(-1)[0] += 1e-6


def _unaveraged(patch: Patch) -> None:
    """What this rank adds to the gradient after the ranks have averaged it."""
    real = optimizer.Masters.step

    def step(self: Any, *how: Any) -> Any:
        for master in self.masters:
            master.grad[..., 0] += 1e-3
        return real(self, *how)

    patch.setattr(optimizer.Masters, "step", step)


def _twice(batch: Batch, *args: Any) -> tuple[Any, ...]:
    return replace(batch, micro_batches=batch.micro_batches * 2), *args


def _token_more(batch: Batch, *args: Any) -> tuple[Any, ...]:
    counts = replace(batch.denominators, num_tokens=batch.denominators.num_tokens + 1)
    return replace(batch, denominators=counts), *args


# -- hangs


def sleep_forever() -> None:
    """Where a rank stands that never comes back."""
    time.sleep(10_000)


def _stuck_backward(patch: Patch) -> None:
    real, calls = DDPBackend.backward, iter(range(10**6))

    def backward(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == HANGS_AT:
            sleep_forever()
        return real(*args, **kwargs)

    patch.setattr(DDPBackend, "backward", backward)


def _stuck_scores(patch: Patch) -> None:
    real, calls = scoring.Scoring.__call__, iter(range(10**6))

    def call(self: Any, rows: Any) -> Any:
        return sleep_forever if next(calls) == HANGS_AT else real(self, rows)

    patch.setattr(scoring.Scoring, "__call__", call)


HALF = {"per_device_train_batch_size": 8}
# One forward pass a step.
WHOLE = {**HALF, "max_tokens_per_micro_batch": 10_000, "max_steps": 20}


def _one(name: str, code: str, step: int, plant: Plant, says: str = "", **options: Any) -> Mutant:
    return Mutant(name, code, step, plant, {**HALF, **options}, says=says)


def quick_to_judge(patch: Patch) -> None:
    """Two seconds instead of a minute for what a step does, once its times are known."""
    quick = {phase: Allowance(floor_s=2.0) for phase in ("update", "reward")}
    patch.setattr(watch, "allowances", lambda *timeouts: quick)


MUTANTS = (
    _one(
        "steps at another rate",
        "F121",
        1,
        before(optimizer.Masters, "step", lambda m, rate, *how: (m, 2 * rate, *how)),
    ),
    _one("does not average its gradient", "F121", 1, _unaveraged),
    _one("has another bit in one weight", "F121", _TURN, _after_steps(_one_weight)),
    _one("steps other tensors than the model's", "F103", 1, faults.optimizer_holds_others),
    _one("changes frozen weights", "F119", 1, faults.unmerged_inexactly, "on another rank", **faults.LORA),
    _one("has a NaN in its averaged gradient", "F101", 1, faults.nan_in_gradient, "another rank's gradient"),
    _one("has a NaN in its loss", "F101", 1, changed(update, "policy_loss", faults.nan_loss)),
    _one(
        "takes more micro-batches", "F302", 0, before(loop, "update", _twice), "rank 1: update after step 0"
    ),
    _one(
        "counts other tokens", "F302", 0, before(loop, "update", _token_more), "rank 1: update after step 0"
    ),
    _one("leaves a row out", "F111", 1, changed(pack, "micro_batches", faults.row_lost)),
    _one("draws other prompts", "F112", 1, before(Order, "take", another_order)),
    _one("keeps the first weights to sample with", "F114", 2, faults.publishes_once),
    _one("samples at another temperature", "F115", 1, faults.at_another_temperature),
    _one("has a reward that raises", "F107", 0, nothing, "all of them of rank 1", **reward("raises")),
    _one(
        "has a reward that sleeps",
        "F107",
        0,
        nothing,
        "all of them of rank 1: returned nothing within 1 s",
        **reward("sleeps", reward_timeout_s=1, max_steps=1),
    ),
)

HANGS = (
    Mutant(
        "stuck in its backward pass",
        "F301",
        HANGS_AT,
        _stuck_backward,
        WHOLE,
        says="Rank 1 is in update, micro-batch 1 of 1, after step 3, at faults_ranks.py",
        hangs=True,
    ),
    Mutant(
        "stuck in its rewards",
        "F301",
        HANGS_AT,
        _stuck_scores,
        WHOLE,
        says="Rank 0 waits in max",
        hangs=True,
    ),
)

HEALTHY = tuple(
    Mutant(f"without a fault: {name}", "", 0, nothing, {**HALF, **options})
    for name, options in {"whole": {}, "LoRA": faults.LORA, "a reward of a file": reward("lengths")}.items()
)
