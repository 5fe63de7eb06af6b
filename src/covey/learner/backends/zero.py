"""Optimizer state and gradients split over ranks by DeepSpeed (ZeRO-2), weights too (ZeRO-3).

What is watched and clipped are this rank's fragments of the gradient, in float32, before DeepSpeed steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.checkpoint.shards import SavedShards, Shard
from covey.learner.backends.base import LossFunction
from covey.learner.backends.deepspeed import Settings, ZeroEngine
from covey.learner.backends.passes import Passes
from covey.learner.backends.split import SplitModel
from covey.learner.backends.whole import WholeModel
from covey.learner.optimizer import Masters, NonFiniteGradient
from covey.learner.reference import MovingReference
from covey.learner.sharding.partitions import Partitioned
from covey.learner.sharding.weight_buffer import ShardReduction, computing_dtypes
from covey.models.policy import Policy
from covey.options.schema import LearnerOptions
from covey.types import MicroBatch, StepStats, TokenStats


class _Zero(Passes):
    """Takes a step and saves the optimizer, in the same way at all stages.

    DeepSpeed averages gradients over ranks, so losses are scaled by their number. It reduces those of every
    micro-batch, so all ranks must have as many of them.
    """

    is_sharded = True

    def __init__(self, engine: ZeroEngine, options: LearnerOptions) -> None:
        self.engine, self.policy = engine, engine.policy
        # DeepSpeed reduces gradients in the order in which they come.
        self.policy.without_images = "gradients"
        self.dp_rank, self.dp_world = dist.get_rank(), dist.get_world_size()
        self.grad_scale = float(self.dp_world)
        world = dist.group.WORLD
        assert world is not None
        self.reduction = ShardReduction(world)
        masters = list(engine.masters.values())
        low = [n for n, p in self.policy.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        self.masters = Masters(list(engine.masters), masters, masters, options, self.reduction, engine, low)

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward; collective in each micro-batch."""
        return self.engine.backward(micro, loss, self.grad_scale, last=last)

    def gradient_probe(self) -> None:
        """Return None: a rank holds sums over ranks, not the gradient of its own rows."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole gradients by name, put together one tensor at a time. Collective."""
        for name, master in self.engine.masters.items():
            part = torch.zeros_like(master) if master.grad is None else master.grad
            yield name, self.engine.fragments.whole(name, part)

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self.engine.shape(name) for name in self.engine.masters}

    def step(self, learning_rate: float) -> StepStats:
        """Step the masters; none is stepped where one rank's gradient is not finite, and that gradient is
        gone."""
        try:
            return self.masters.step(learning_rate)
        except NonFiniteGradient:
            self.engine.discard()
            raise

    def shards(self) -> list[Shard]:
        """Return this rank's share of AdamW's moments and the masters, whole tensors. Collective."""
        return self.engine.fragments.shards(self.masters.state())

    def load_shards(self, saved: SavedShards) -> None:
        """Restore the fragments of this rank. The model was saved as it computes, and is loaded."""
        self.masters.load_state(self.engine.fragments.own_shards(saved))

    def close(self) -> None:
        """Take DeepSpeed off the policy."""
        self.engine.close()


class Zero2Backend(_Zero, WholeModel):
    """Holds all weights on each rank, which steps its part of them."""

    def __init__(
        self,
        engine: ZeroEngine,
        options: LearnerOptions,
        *,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        super().__init__(engine, options)
        self.sampler, self.reference, self.moving = self.policy, reference, moving

    def move_reference(self, step: int) -> bool:
        """Put whole masters together for a sync, one at a time; return whether one was due."""
        fragments, masters = self.engine.fragments, self.engine.masters
        whole = ((name, fragments.whole(name, master.detach())) for name, master in masters.items())
        return self.moving is not None and self.moving.move(step, whole)


class Zero3Backend(_Zero, SplitModel):
    """Holds a part of every tensor on each rank."""

    def __init__(
        self,
        partitioned: Partitioned,
        sampler: Policy,
        options: LearnerOptions,
        *,
        compute_dtype: torch.dtype,
        reference: Partitioned | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        _Zero.__init__(self, partitioned.engine, options)
        SplitModel.__init__(
            self,
            partitioned,
            sampler,
            compute_dtype=compute_dtype,
            reduction=self.reduction,
            reference=reference,
            moving=moving,
        )
        self._engines = [e.engine for e in (partitioned, reference) if e is not None]
        for engine in self._engines:
            # Each module of the tower gathers its weights as it runs.
            engine.policy.without_images = "pass"

    def move_reference(self, step: int) -> bool:
        """Move this rank's parts of the reference where a sync is due; return whether it was."""
        return self.moving is not None and self.moving.move(step, self.masters.each())

    def close(self) -> None:
        """Take DeepSpeed off the policy and its reference."""
        for engine in self._engines:
            engine.close()


@torch.no_grad()
def whole_engine(
    policy: Policy, given: Settings, options: LearnerOptions, compute_dtype: torch.dtype
) -> ZeroEngine:
    """Return an engine of stage 1 or 2 around a policy whose weights are float32, which become the
    masters."""
    parameters = dict(policy.named_parameters())
    dtypes = computing_dtypes(parameters, compute_dtype)
    saved = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and dtypes[name] != parameter.dtype:
            saved[name] = parameter.data
        if not parameter.requires_grad:
            dtypes[name] = compute_dtype
        parameter.data = parameter.data.to(dtypes[name])
    engine = ZeroEngine(policy, given, options)
    for name, weight in saved.items():
        engine.masters[name].copy_(engine.fragments[name].of(weight))
    return engine
