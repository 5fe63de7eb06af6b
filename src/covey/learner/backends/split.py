"""A model that is split over ranks: what is sampled, checked, saved and handed back of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from covey.checkpoint.model_files import ModelFiles
from covey.learner.backends.base import ModelWriter
from covey.learner.backends.passes import Passes
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import whole_checksums
from covey.learner.optimizer import Across
from covey.learner.reference import MovingReference
from covey.learner.sharding.protocol import Split
from covey.learner.sharding.room import Room, computing_dtypes
from covey.models.lora import (
    AdapterAlone,
    Named,
    adapter_tensors,
    adapter_weights,
    applied_rank,
    base_weights,
    in_dtype,
    is_of_adapter,
    merged,
    plain_weights,
    reset_magnitudes,
)
from covey.models.policy import Policy
from covey.text_files import TextFiles


class SplitModel(Passes):
    """`sampler` is a policy without weights beside the one that is split: a rollout fills it and lets go of
    it after."""

    is_sharded = True
    dp_rank: int
    dp_world: int

    def __init__(
        self,
        split: Split,
        sampler: Policy,
        *,
        compute_dtype: torch.dtype,
        across: Across,
        reference: Split | None,
        moving: MovingReference | None,
    ) -> None:
        self.split, self.split_reference, self._across = split, reference, across
        self.policy, self.sampler, self.moving = split.policy, sampler, moving
        self.reference = None if reference is None else reference.policy
        dtypes = computing_dtypes(dict(self.policy.named_parameters()), compute_dtype)
        self._compute_dtype = compute_dtype
        self._room = Room(sampler, self.policy.device, dtypes)
        self._reset_magnitudes()

    @torch.no_grad()
    def _reset_magnitudes(self) -> None:
        """Give a new adapter of DoRA its magnitudes, norms of whole weights; a saved one has them, and none
        is 0. Collective."""
        own = {n: t for n, t in self.trained().items() if "magnitude" in n}
        total = sum((t.abs().sum().cpu() for t in own.values()), torch.zeros(()))
        if not own or self.sampler.adapter is None or float(self._across.sum(total)):
            return
        with self._room.held(self.split.whole()):
            reset_magnitudes(self.sampler.adapter)
            self.sampler.requires_grad_(False)
            whole = dict(self.sampler.named_parameters())
            self.split.refill({name: whole[name] for name in own})
        if self.moving is not None:
            # It was made of the policy before.
            masters = self.split.masters()
            self.moving.load_state({**self.moving.state(), **{name: masters[name] for name in own}})

    def let_go(self) -> None:
        """Free the weights that a pass without a backward pass leaves gathered."""
        self.split.let_go()
        if self.split_reference is not None:
            self.split_reference.let_go()

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The sampler with whole weights as they compute, gathered a layer at a time."""
        with self._room.held(self.split.whole()), self._rest_away(), merged(self.sampler):
            yield self.sampler

    def _rest_away(self) -> AbstractContextManager[None]:
        """Within it what a rollout does not need is in CPU memory, where that was asked for."""
        return nullcontext()

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Gathered a layer at a time; with an adapter, all of them before the first."""
        if self.policy.adapter is not None:
            with nullcontext() if self._room.is_held else self._room.held(self.split.whole()):
                yield from in_dtype(plain_weights(self.sampler), dtype)
            return
        whole = self.sampler.named_parameters() if self._room.is_held else self.split.whole()
        yield from in_dtype(_of_model(whole), dtype)

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """That of the sampler: the base is gathered a layer at a time, of the adapter its matrices alone."""
        adapter, rank = self.sampler.adapter, applied_rank(self.sampler)
        if adapter is None or not rank:
            return None
        scaling, names = adapter.settings.scaling, [n for n in self.trained() if is_of_adapter(n)]

        def base(dtype: torch.dtype | None) -> Named:
            return in_dtype(base_weights(_of_model(self.split.whole())), dtype)

        def matrices(dtype: torch.dtype | None) -> Named:
            own = _of_model(self.split.each_whole(names))
            return adapter_weights(own, scaling, dtype or self._compute_dtype)

        return AdapterAlone(rank=rank, base=base, matrices=matrices)

    def frozen(self) -> Mapping[str, Tensor]:
        """This rank's parts of the base of an adapter, and of the reference."""
        trained = self.trained()
        own = {n: t for n, t in self.split.held().items() if n not in trained}
        reference = {} if self.split_reference is None else self.split_reference.held()
        return {**own, **{f"reference {n}": t for n, t in reference.items()}}

    def trained(self) -> Mapping[str, Tensor]:
        """This rank's parts of what is trained."""
        held = self.split.held()
        return {n: held[n] for n, p in self.policy.named_parameters() if p.requires_grad}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Sums over the parts of all ranks."""
        return whole_checksums(tensors, self._across)

    def model_writer(self, text: TextFiles, base: str | None) -> ModelWriter:
        """Each rank keeps the tensors that it writes, on the CPU; the first one an adapter."""
        adapter = self.sampler.adapter
        if adapter is not None:
            with self._room.held(self.split.whole()):
                own = {n: t.to("cpu", copy=True) for n, t in adapter_tensors(adapter).items()}
            return adapter_writer(adapter, own, text, base, self.dp_rank)
        files = ModelFiles(self.sampler.model, self.dp_rank, self.dp_world)
        for name, weight in self.split.whole():
            files.add(name.removeprefix("model."), weight)
        return model_writer(files, text, self.dp_rank)

    @torch.no_grad()
    def give_back(self, model: nn.Module) -> None:
        """Copy the whole weights into the model that the parts were made of."""
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in self.weights():
            own[name].copy_(weight)


def _of_model(named: Iterable[tuple[str, Tensor]]) -> Named:
    """A policy's tensors by the names that they have in its model."""
    return ((name.removeprefix("model."), tensor) for name, tensor in named)
