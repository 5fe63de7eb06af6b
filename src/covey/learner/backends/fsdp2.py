"""Weights, gradients and optimizer state split over ranks: torch's fully_shard (FSDP2).

Each rank holds its rows of every tensor in float32, and they are the masters: a layer's weights come together
in the dtype that computes while the layer runs. Gradients are reduced in float32. What is watched, clipped
and stepped are the shards, as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.algorithm.losses import LossOutput
from covey.checkpoint.shards import SavedShards, Shard
from covey.learner.backends.base import LossFunction, Objective
from covey.learner.backends.split import SplitModel
from covey.learner.offload import Offloaded
from covey.learner.optimizer import Masters
from covey.learner.rates import rate_factors
from covey.learner.reference import MovingReference
from covey.learner.sampled import sampled_gradients
from covey.learner.sharding.units import Sharded, local
from covey.learner.sharding.weight_buffer import ShardReduction
from covey.models.policy import Policy
from covey.options.schema import LearnerOptions
from covey.types import MicroBatch, StepStats, TokenStats


class FSDP2Backend(SplitModel):
    """Trains a policy that FSDP2 splits. FSDP averages gradients over ranks, so losses are scaled by the
    number of ranks.

    Where `reduces_each`, a micro-batch's gradients are reduced as it ends, so that no rank holds whole ones;
    else they add up whole, in float32, and are reduced in the last.
    """

    def __init__(
        self,
        sharded: Sharded,
        sampler: Policy,
        options: LearnerOptions,
        *,
        compute_dtype: torch.dtype,
        reduces_each: bool = False,
        reference: Sharded | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        self.dp_rank, self.dp_world = dist.get_rank(), dist.get_world_size()
        self.grad_scale = float(self.dp_world)
        mesh = sharded.sharding.mesh
        reduction = ShardReduction(mesh.get_group(mesh.ndim - 1))
        self._reduces_each = reduces_each
        self._trained = {n: p for n, p in sharded.parameters.items() if p.requires_grad}
        # The tower comes together with the embedding and the head, and so do their gradients.
        sharded.policy.without_images = "zeros"
        super().__init__(
            sharded,
            sampler,
            compute_dtype=compute_dtype,
            reduction=reduction,
            reference=reference,
            moving=moving,
        )
        shards = [nn.Parameter(local(p)) for p in self._trained.values()]
        low = [n for n in self._trained if self._buffer.dtypes[n] != torch.float32]
        factors = rate_factors(sharded.policy, options)
        self.masters = Masters(
            list(self._trained), shards, shards, options, reduction, low=low, factors=factors
        )
        self._options = options
        self._offloaded_shards = Offloaded(self._all_shards)
        if moving is not None and options.offload_reference:
            moving.offloaded = Offloaded(moving.own_tensors)
            moving.offloaded.to_cpu()

    def _all_shards(self) -> list[Tensor]:
        """Return this rank's rows of the policy and of its reference that are not always in CPU memory."""
        found = list(self.split.held().values())
        if self._options.offload_reference:
            return found
        if self.split_reference is not None:
            found += self.split_reference.held().values()
        return found if self.moving is None else [*found, *self.moving.own_tensors()]

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward; collective in each micro-batch."""
        is_reduced = last or self._reduces_each
        self.policy.set_requires_gradient_sync(is_reduced)  # type: ignore[operator]
        self.policy.set_is_last_backward(last)  # type: ignore[operator]
        stats = self.policy(micro)
        output = loss(stats, micro)
        (output.loss * self.grad_scale).backward()
        if last:
            for parameter, shard in zip(self._trained.values(), self.masters.masters, strict=True):
                shard.grad = None if parameter.grad is None else local(parameter.grad)
        return stats, output

    def gradient_probe(self) -> None:
        """Return None: a rank holds sums over ranks, and nothing before the last pass."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the accumulated gradients by name, gathered one tensor at a time."""
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            if gradient is None:
                yield name, torch.zeros(parameter.shape)
            else:
                yield name, gradient.full_tensor()  # type: ignore[attr-defined]

    def plain_gradient(
        self,
        micros: Sequence[MicroBatch],
        objective: Objective,
        sample: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Return what autograd computes for whole weights, before FSDP reduces it; FSDP is given zeros
        instead."""
        seen = {name: weight for name, weight in self.split.whole() if weight.requires_grad}
        self.policy.set_requires_gradient_sync(True)  # type: ignore[operator]
        with sampled_gradients(seen, sample) as sums:
            for micro in micros:
                objective(self.policy(micro), micro).backward()
        return {name: sums[name] for name in self._trained}

    def step(self, learning_rate: float) -> StepStats:
        """Step the shards of this rank; none is stepped where one rank's gradient is not finite."""
        for shard, parameter in zip(self.masters.masters, self._trained.values(), strict=True):
            assert parameter.to_local().data_ptr() == shard.data_ptr(), "FSDP moved a shard"
        stats = self.masters.step(learning_rate)
        for parameter in self._trained.values():
            parameter.grad = None
        return stats

    def move_reference(self, step: int) -> bool:
        """Move this rank's rows of the reference where a sync is due; return whether it was."""
        return self.moving is not None and self.moving.move(step, self.masters.each())

    @contextmanager
    def _idle_tensors_on_cpu(self) -> Iterator[None]:
        if not self._options.offload_model:
            yield
            return
        self.split.let_go()
        with self.masters.on_cpu(), self._offloaded_shards.on_cpu():
            yield

    def shards(self) -> Iterable[Shard]:
        """Return this rank's rows of masters and moments; of equal shards the first rank returns its own."""
        return self.split.shards(self.masters.state())

    def load_shards(self, saved: SavedShards) -> None:
        """Restore the rows of this rank."""
        self.masters.load_state(self.split.own_shards(saved))

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
