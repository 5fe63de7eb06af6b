"""Weights, gradients and optimizer state split over ranks: torch's fully_shard (FSDP2).

Each rank holds its rows of every tensor in float32, and they are the masters: a layer's weights come together
in the dtype that computes while the layer runs. Gradients are reduced in float32. What is watched, clipped
and stepped are the shards, as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.algorithm.losses import LossOutput
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.backends.base import Advance, Annotation, LossFunction, ModelWriter, Objective
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import whole_checksums
from covey.learner.offload import Parked
from covey.learner.optimizer import Masters, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.learner.sampled import sampled_gradients
from covey.learner.sharding.room import Room, Shards, computing_dtypes
from covey.learner.sharding.units import Sharded, local
from covey.models.lora import adapter_off, adapter_tensors, merged, plain_weights, reset_magnitudes
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats


class FSDP2Backend:
    """FSDP averages gradients over ranks, so losses are scaled by their number.

    `sampler` is a policy without weights beside the sharded one: a rollout fills it and lets go of it after.
    Where `reduces_each`, a micro-batch's gradients are reduced as it ends, so that no rank holds whole ones;
    else they add up whole, in float32, and are reduced in the last.
    """

    is_sharded = True

    def __init__(
        self,
        sharded: Sharded,
        sampler: Policy,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype,
        reduces_each: bool = False,
        reference: Sharded | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        self._sharded, self._reference, self._reduces_each = sharded, reference, reduces_each
        self.policy, self.sampler = sharded.policy, sampler
        self.moving = moving
        self.dp_rank, self.dp_world = dist.get_rank(), dist.get_world_size()
        self.grad_scale = float(self.dp_world)
        trained = {n: p for n, p in sharded.parameters.items() if p.requires_grad}
        shards = [nn.Parameter(local(p)) for p in trained.values()]
        mesh = sharded.sharding.mesh
        self._trained, self._across = trained, Shards(mesh.get_group(mesh.ndim - 1))
        self.masters = Masters(list(trained), shards, shards, config, self._across)
        self._offload = config.offload
        self._shards = Parked(self._all_shards)
        if moving is not None and config.offload.reference:
            moving.parked = Parked(moving.own_tensors)
            moving.parked.leave()
        self._room = Room(
            sampler, sharded.sharding.device, computing_dtypes(sharded.parameters, compute_dtype)
        )
        self._reset_magnitudes()

    @torch.no_grad()
    def _reset_magnitudes(self) -> None:
        """Give a new adapter of DoRA its magnitudes, norms of whole weights; a saved one has them, and none
        is 0. Collective."""
        own = {n: p for n, p in self._trained.items() if "magnitude" in n}
        total = sum((local(p).abs().sum() for p in own.values()), torch.zeros(()))
        if not own or self.sampler.adapter is None or float(self._across.sum(total)):
            return
        with self._room.held(self._sharded.whole()):
            reset_magnitudes(self.sampler.adapter)
            self.sampler.requires_grad_(False)
            whole = dict(self.sampler.named_parameters())
            self._sharded.refill({name: whole[name] for name in own})

    def _all_shards(self) -> list[Tensor]:
        """This rank's rows of the policy and of its reference, but for what is in CPU memory in any case."""
        own = list(self._sharded.parameters.values())
        still = [] if self._reference is None else list(self._reference.parameters.values())
        moving = [] if self.moving is None or self._offload.reference else self.moving.own_tensors()
        return [*map(local, own), *(local(p) for p in still if not self._offload.reference), *moving]

    def use_layout(self, probed: Policy) -> None:
        """As probed; but each pass computes its own prompts, since one that did not would run its layers less
        often than another rank's."""
        for policy in (self.policy, *([self._reference.policy] if self._reference else [])):
            policy.use_layout_of(probed)
            policy.shares_prompts = False

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """As many passes on every rank. Collective."""
        sharded = self._reference if which == "reference" and self._reference else self._sharded
        values = []
        with self._turned_to(which):
            for micro in micros:
                stats = sharded.policy(micro)
                values.append(stats.entropy_N if which == "entropy" else stats.logprob_N)
                advance()
            sharded.let_go()
        return torch.cat(values)

    def _turned_to(self, which: Annotation) -> AbstractContextManager[object]:
        """Within it the policy is the reference, where that is made of it."""
        if which != "reference" or self._reference is not None:
            return nullcontext()
        return adapter_off(self.policy) if self.moving is None else self.moving.view()

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; collective in each micro-batch."""
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
        """Not known of a rank's own rows: what is there are sums over ranks, or nothing before the last
        pass."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one tensor at a time."""
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
        """What autograd has for whole weights, before FSDP reduces it: in place of it FSDP is given zeros."""
        seen = {name: weight for name, weight in self._sharded.whole() if weight.requires_grad}
        self.policy.set_requires_gradient_sync(True)  # type: ignore[operator]
        with sampled_gradients(seen, sample) as sums:
            for micro in micros:
                objective(self.policy(micro), micro).backward()
        return {name: sums[name] for name in self._trained}

    def step(self, learning_rate: float) -> StepStats:
        """The shards of this rank; none is stepped where one rank's gradient is not finite."""
        for shard, parameter in zip(self.masters.masters, self._trained.values(), strict=True):
            assert parameter.to_local().data_ptr() == shard.data_ptr(), "FSDP moved a shard"
        stats = self.masters.step(learning_rate)
        for parameter in self._trained.values():
            parameter.grad = None
        return stats

    def move_reference(self, step: int) -> bool:
        """The rows of this rank, where a sync is due."""
        return self.moving is not None and self.moving.move(step, self.masters)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The sampler with whole weights as they compute, gathered a layer at a time; the shards are in CPU
        memory meanwhile where that was asked for."""
        with self._room.held(self._sharded.whole()), self._rest_away(), merged(self.sampler):
            yield self.sampler

    @contextmanager
    def _rest_away(self) -> Iterator[None]:
        if not self._offload.model:
            yield
            return
        self._sharded.let_go()
        with self.masters.away(), self._shards.away():
            yield

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Gathered a layer at a time; with an adapter, all of them before the first."""
        if self.policy.adapter is not None:
            with nullcontext() if self._room.is_held else self._room.held(self._sharded.whole()):
                for name, weight in plain_weights(self.sampler):
                    yield name, weight if dtype is None else weight.to(dtype)
            return
        held = self.sampler.named_parameters() if self._room.is_held else self._sharded.whole()
        for name, weight in held:
            yield name.removeprefix("model."), weight if dtype is None else weight.to(dtype)

    def frozen(self) -> Mapping[str, Tensor]:
        """The shards of the base of an adapter, and of the reference."""
        own = {n: local(p) for n, p in self._sharded.parameters.items() if not p.requires_grad}
        still = {} if self._reference is None else self._reference.parameters
        return {**own, **{f"reference {n}": local(p) for n, p in still.items()}}

    def trained(self) -> Mapping[str, Tensor]:
        """The float32 shards."""
        return {n: local(p) for n, p in self._trained.items()}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Sums over the shards."""
        return whole_checksums(tensors, self._across)

    def model_writer(self, origin: Path, base: str | None) -> ModelWriter:
        """Each rank keeps the tensors that it writes, on the CPU; the first one an adapter."""
        adapter = self.sampler.adapter
        if adapter is not None:
            with self._room.held(self._sharded.whole()):
                own = {n: t.to("cpu", copy=True) for n, t in adapter_tensors(adapter).items()}
            return adapter_writer(adapter, own, origin, base, self.dp_rank)
        files = ModelFiles(self.sampler.model, self.dp_rank, self.dp_world)
        for name, weight in self._sharded.whole():
            files.add(name.removeprefix("model."), weight)
        return model_writer(files, origin, self.dp_rank)

    def pieces(self) -> Iterator[Piece]:
        """The rows of this rank; of equal shards those of the first."""
        masters = {f"master/{n}": local(p) for n, p in self._trained.items() if self._is_low(n)}
        return self._sharded.pieces({**self.masters.state(), **masters})

    @torch.no_grad()
    def load_pieces(self, saved: SavedPieces) -> None:
        """The rows of this rank."""
        own = self._sharded.own_rows(saved)
        self.masters.load_state(own)
        for name, parameter in self._trained.items():
            if self._is_low(name):
                local(parameter).copy_(own[f"master/{name}"])

    def _is_low(self, name: str) -> bool:
        """Whether it computes in a lower dtype than it is held in, so that no saved model has it."""
        return self._room.dtypes[name] != torch.float32

    @torch.no_grad()
    def give_back(self, model: nn.Module) -> None:
        """Copy the whole weights into the model that the shards were made of."""
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in self.weights():
            own[name].copy_(weight)

    def close(self) -> None:
        """Nothing to let go of."""
