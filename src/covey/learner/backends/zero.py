"""Optimizer state and gradients split over ranks by DeepSpeed (ZeRO-2), weights too (ZeRO-3).

What is watched and clipped are this rank's fragments of the gradient, in float32, before DeepSpeed steps.
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
from covey.checksums import checksum
from covey.learner.backends.base import Advance, Annotation, LossFunction, ModelWriter, Objective
from covey.learner.backends.deepspeed import Settings, ZeroEngine
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import frozen_tensors, whole_checksums
from covey.learner.optimizer import Masters, NonFiniteGradient, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.learner.sampled import sampled_gradients
from covey.learner.sharding.partitions import Partitioned
from covey.learner.sharding.room import Room, Shards, computing_dtypes
from covey.models.live import fold_adapter
from covey.models.lora import adapter_off, adapter_tensors, merged, plain_weights, reset_magnitudes
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats


class _ZeroBackend:
    """What the stages have in common: a step, and what is saved of it.

    DeepSpeed averages gradients over ranks, so losses are scaled by their number. It reduces those of every
    micro-batch, which all ranks must have as many of.
    """

    is_sharded = True
    policy: Policy
    sampler: Policy
    reference: Policy | None = None

    def __init__(self, engine: ZeroEngine, config: OptimizerConfig, moving: MovingReference | None) -> None:
        self.engine, self.policy, self.moving = engine, engine.policy, moving
        self.dp_rank, self.dp_world = dist.get_rank(), dist.get_world_size()
        self.grad_scale = float(self.dp_world)
        world = dist.group.WORLD
        assert world is not None
        self._across = Shards(world)
        masters = list(engine.masters.values())
        self.masters = Masters(list(engine.masters), masters, masters, config, self._across, engine)
        # Those that compute in a lower dtype than they are stepped in, so that no saved model has them.
        self._low = [
            n for n, p in self.policy.named_parameters() if p.requires_grad and p.dtype != torch.float32
        ]

    def use_layout(self, probed: Policy) -> None:
        """As probed; but each pass computes its own prompts, since one that did not would run its layers less
        often than another rank's."""
        for policy in (self.policy, *([self.reference] if self.reference else [])):
            policy.use_layout_of(probed)
            policy.shares_prompts = False

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """As many passes on every rank. Collective."""
        values = []
        with self._model_of(which) as policy:
            for micro in micros:
                stats = policy(micro)
                values.append(stats.entropy_N if which == "entropy" else stats.logprob_N)
                advance()
        self.let_go()
        return torch.cat(values)

    def _model_of(self, which: Annotation) -> AbstractContextManager[Policy]:
        if which != "reference":
            return nullcontext(self.policy)
        if self.moving is not None:
            return self.moving.view()
        return adapter_off(self.policy) if self.reference is None else nullcontext(self.reference)

    def let_go(self) -> None:
        """Free the weights that passes without a backward pass leave gathered."""

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; collective in each micro-batch."""
        return self.engine.backward(micro, loss, self.grad_scale, last=last)

    def gradient_probe(self) -> None:
        """Not known of a rank's own rows: what is there are sums over ranks."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Put together one tensor at a time."""
        for name, master in self.engine.masters.items():
            part = torch.zeros_like(master) if master.grad is None else master.grad
            yield name, self.engine.fragments.whole(name, part)

    def plain_gradient(
        self,
        micros: Sequence[MicroBatch],
        objective: Objective,
        sample: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """What autograd has for whole weights; DeepSpeed's reduction is not run."""
        trained = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        shapes = {name: self.engine.shape(name) for name in trained}
        with sampled_gradients(trained, sample, shapes) as sums:
            for micro in micros:
                value = objective(self.policy(micro), micro)
                torch.autograd.grad(value, list(trained.values()), allow_unused=True)
                self.let_go()
        return sums

    def step(self, learning_rate: float) -> StepStats:
        """None is stepped where one rank's gradient is not finite; that gradient is then gone."""
        try:
            return self.masters.step(learning_rate)
        except NonFiniteGradient:
            self.engine.discard()
            raise

    def frozen(self) -> Mapping[str, Tensor]:
        """What this rank holds of what stands still."""
        raise NotImplementedError

    def pieces(self) -> list[Piece]:
        """Its part of AdamW's moments and the masters, whole tensors. Collective."""
        masters = {f"master/{name}": self.engine.masters[name].detach() for name in self._low}
        return self.engine.fragments.pieces({**self.masters.state(), **masters})

    @torch.no_grad()
    def load_pieces(self, saved: SavedPieces) -> None:
        """The fragments of this rank. The model was saved as it computes, and is loaded."""
        own = self.engine.fragments.own(saved)
        self.masters.load_state(own)
        for name in self._low:
            self.engine.masters[name].copy_(own[f"master/{name}"])

    def close(self) -> None:
        """Take DeepSpeed off the policy."""
        self.engine.close()


class Zero2Backend(_ZeroBackend):
    """Each rank has all weights, and steps its part of them; the sampler is the policy."""

    def __init__(
        self,
        engine: ZeroEngine,
        config: OptimizerConfig,
        *,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        super().__init__(engine, config, moving)
        self.sampler, self.reference = self.policy, reference

    def move_reference(self, step: int) -> bool:
        """Whole masters are put together for it, one at a time."""
        return self.moving is not None and self.moving.move(step, _Whole(self.engine))  # type: ignore[arg-type]

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The policy itself, in evaluation mode, its adapter merged where that is exact."""
        training = self.policy.training
        self.policy.eval()
        try:
            with merged(self.policy):
                yield self.policy
        finally:
            self.policy.train(training)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, adapters merged, in `dtype` (None: as held)."""
        for name, weight in plain_weights(self.policy):
            yield name, weight if dtype is None else weight.to(dtype)

    def frozen(self) -> Mapping[str, Tensor]:
        """Frozen tensors of the policy, and a reference that does not move."""
        return frozen_tensors(self.policy, None if self.moving is not None else self.reference)

    def trained(self) -> Mapping[str, Tensor]:
        """The trained parameters, as they compute."""
        return {n: p.detach() for n, p in self.policy.named_parameters() if p.requires_grad}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Those of the tensors themselves."""
        return [checksum(tensor) for tensor in tensors.values()]

    def model_writer(self, origin: Path, base: str | None) -> ModelWriter:
        """Tensors are dealt out to the processes; the first one writes an adapter."""
        adapter = self.policy.adapter
        if adapter is not None:
            return adapter_writer(adapter, adapter_tensors(adapter), origin, base, self.dp_rank)
        files = ModelFiles(self.policy.model, self.dp_rank, self.dp_world)
        return model_writer(files.add_all(self.policy.model.named_parameters()), origin, self.dp_rank)

    def give_back(self, model: nn.Module) -> None:
        """The policy is that model; an adapter is added to it for good."""
        fold_adapter(self.policy)


class _Whole:
    """Whole masters with their names, as a reference that moves reads them."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other. Collective."""
        return ((n, self._engine.fragments.whole(n, m.detach())) for n, m in self._engine.masters.items())


class Zero3Backend(_ZeroBackend):
    """Each rank has its part of every tensor. `sampler` is a policy without weights beside the other: a
    rollout fills it and lets go of it after."""

    def __init__(
        self,
        partitioned: Partitioned,
        sampler: Policy,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype,
        reference: Partitioned | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        super().__init__(partitioned.engine, config, moving)
        self.partitioned, self._still = partitioned, reference
        self.sampler = sampler
        self.reference = None if reference is None else reference.policy
        parameters = dict(self.policy.named_parameters())
        self._room = Room(sampler, self.policy.device, computing_dtypes(parameters, compute_dtype))
        self._reset_magnitudes()

    @torch.no_grad()
    def _reset_magnitudes(self) -> None:
        """Give a new adapter of DoRA its magnitudes, norms of whole weights; a saved one has them, and none
        is 0. Collective."""
        own = [n for n in self.engine.masters if "magnitude" in n]
        total = sum((self.engine.masters[n].detach().abs().sum().cpu() for n in own), torch.zeros(()))
        if not own or self.sampler.adapter is None or float(self._across.sum(total)):
            return
        with self._room.held(self.partitioned.whole()):
            reset_magnitudes(self.sampler.adapter)
            self.sampler.requires_grad_(False)
            whole = dict(self.sampler.named_parameters())
            self.partitioned.refill({name: whole[name] for name in own})

    def let_go(self) -> None:
        """Free the weights that passes have left gathered."""
        self.partitioned.let_go()
        if self._still is not None:
            self._still.let_go()

    def move_reference(self, step: int) -> bool:
        """The parts of this rank, where a sync is due."""
        return self.moving is not None and self.moving.move(step, self.masters)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The sampler with whole weights as they compute, gathered a layer at a time."""
        with self._room.held(self.partitioned.whole()), merged(self.sampler):
            yield self.sampler

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Gathered a layer at a time; with an adapter, all of them before the first."""
        if self.policy.adapter is not None:
            with nullcontext() if self._room.is_held else self._room.held(self.partitioned.whole()):
                for name, weight in plain_weights(self.sampler):
                    yield name, weight if dtype is None else weight.to(dtype)
            return
        for name, weight in self.partitioned.whole():
            yield name.removeprefix("model."), weight if dtype is None else weight.to(dtype)

    def frozen(self) -> Mapping[str, Tensor]:
        """The parts of the base of an adapter, and of the reference."""
        own = {n: t for n, t in self.engine.held().items() if n not in self.engine.masters}
        still = {} if self._still is None else self._still.engine.held()
        return {**own, **{f"reference {n}": t for n, t in still.items()}}

    def trained(self) -> Mapping[str, Tensor]:
        """The parts as they compute."""
        return {n: t for n, t in self.engine.held().items() if n in self.engine.masters}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Sums over the parts."""
        return whole_checksums(tensors, self._across)

    def model_writer(self, origin: Path, base: str | None) -> ModelWriter:
        """Each rank keeps the tensors that it writes, on the CPU; the first one an adapter."""
        adapter = self.sampler.adapter
        if adapter is not None:
            with self._room.held(self.partitioned.whole()):
                own = {n: t.to("cpu", copy=True) for n, t in adapter_tensors(adapter).items()}
            return adapter_writer(adapter, own, origin, base, self.dp_rank)
        files = ModelFiles(self.sampler.model, self.dp_rank, self.dp_world)
        for name, weight in self.partitioned.whole():
            files.add(name.removeprefix("model."), weight)
        return model_writer(files, origin, self.dp_rank)

    @torch.no_grad()
    def give_back(self, model: nn.Module) -> None:
        """Copy the whole weights into the model that the parts were made of."""
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in self.weights():
            own[name].copy_(weight)

    def close(self) -> None:
        """Take DeepSpeed off the policy and its reference."""
        super().close()
        if self._still is not None:
            self._still.engine.close()


@torch.no_grad()
def whole_engine(
    policy: Policy, given: Settings, config: OptimizerConfig, compute_dtype: torch.dtype
) -> ZeroEngine:
    """An engine of stage 1 or 2 around a policy whose weights are float32, which become the masters."""
    parameters = dict(policy.named_parameters())
    dtypes = computing_dtypes(parameters, compute_dtype)
    saved = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and dtypes[name] != parameter.dtype:
            saved[name] = parameter.data
        if not parameter.requires_grad:
            dtypes[name] = compute_dtype
        parameter.data = parameter.data.to(dtypes[name])
    engine = ZeroEngine(policy, given, config)
    for name, weight in saved.items():
        engine.masters[name].copy_(engine.fragments[name].of(weight))
    return engine
