"""Models that are split over ranks: how they sample, how they are checked, saved and given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from covey.checkpoint.model_files import ModelFiles
from covey.learner.backends.base import ModelWriter
from covey.learner.backends.passes import Passes
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import whole_checksums
from covey.learner.optimizer import Reduction
from covey.learner.reference import MovingReference
from covey.learner.sharding.layers import layout_of_layers, pairs_of_layers
from covey.learner.sharding.protocol import Split
from covey.learner.sharding.weight_buffer import WeightBuffer, computing_dtypes
from covey.models.adapter_shapes import is_of_adapter, saved_name
from covey.models.load import Attention
from covey.models.lora import (
    AdapterAlone,
    Named,
    adapter_tensors,
    adapter_weights,
    applied_rank,
    base_weights,
    in_dtype,
    merged,
    plain_weights,
    reset_magnitudes,
)
from covey.models.policy import Policy, RowLayout, narrowest
from covey.text_files import TextFiles


class SplitModel(Passes):
    """Holds a policy whose tensors are split over ranks, and `sampler`, a policy without weights of its own:
    a rollout fills it and frees it afterwards."""

    is_sharded = True
    dp_rank: int
    dp_world: int

    def __init__(
        self,
        split: Split,
        sampler: Policy,
        *,
        compute_dtype: torch.dtype,
        reduction: Reduction,
        reference: Split | None,
        moving: MovingReference | None,
    ) -> None:
        self.split, self.split_reference, self._reduction = split, reference, reduction
        self.policy, self.sampler, self.moving = split.policy, sampler, moving
        self.reference = None if reference is None else reference.policy
        dtypes = computing_dtypes(dict(self.policy.named_parameters()), compute_dtype)
        self._compute_dtype = compute_dtype
        self._buffer = WeightBuffer(sampler, self.policy.device, dtypes)
        self._reset_magnitudes()

    @torch.no_grad()
    def _reset_magnitudes(self) -> None:
        """Give a new adapter of DoRA its magnitudes, norms of whole weights; a saved one has them, and none
        is 0. Collective."""
        own = {n: t for n, t in self.trained().items() if "magnitude" in n}
        total = sum((t.abs().sum().cpu() for t in own.values()), torch.zeros(()))
        if not own or self.sampler.adapter is None or float(self._reduction.sum(total)):
            return
        adapted = {n: m for n, m in self.sampler.named_modules() if hasattr(m, "lora_A")}
        values: dict[str, Tensor] = {}
        for unit in self.split.units:
            with self.split.unit(unit) as tensors, self._buffer.lent(tensors):
                reset_magnitudes(m for n, m in adapted.items() if f"{n}.base_layer.weight" in tensors)
                self.sampler.requires_grad_(False)
                made = dict(self.sampler.named_parameters())
                for name in own.keys() & tensors.keys():
                    values[name] = made[name].data.clone()
                    made[name].untyped_storage().resize_(0)
        self.split.refill(values)
        if self.moving is not None:
            # It was made of the policy before.
            masters = self.split.masters()
            self.moving.load_state({**self.moving.state(), **{name: masters[name] for name in own}})

    def let_go(self) -> None:
        """Free the weights that a pass without a backward pass leaves gathered."""
        self.split.let_go()
        if self.split_reference is not None:
            self.split_reference.let_go()

    def choose_layout(self, attention: Attention) -> None:
        """Use the layout that layers of each kind pass the probe with. Two layers at a time are gathered,
        with the embedding and the head. Collective."""
        self.split.let_go()
        pairs = pairs_of_layers(self.sampler)
        found = [self._probed(pair, attention) for pair in pairs]
        if len({layout.attention for layout in found}) > 1:
            # A layer could not run with flex attention, so none does.
            found = [self._probed(pair, "sdpa") for pair in pairs]
        self.sampler.use_layout(narrowest(found))
        self._use_layout(self.sampler.layout)

    def _probed(self, layers: Sequence[int], attention: Attention) -> RowLayout:
        names = list(self.split.units)
        with ExitStack() as stack:
            for unit in ("", *(names[number] for number in layers)):
                stack.enter_context(self._buffer.lent(stack.enter_context(self.split.unit(unit))))
            return layout_of_layers(self.sampler, layers, attention)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """Within it, the sampler has whole weights in the dtype that they compute in. They are gathered a
        layer at a time. Collective."""
        with self._buffer.filled(self.split.whole()), self._idle_tensors_on_cpu(), merged(self.sampler):
            yield self.sampler

    def _idle_tensors_on_cpu(self) -> AbstractContextManager[None]:
        """Return a context within which tensors that a rollout does not need are in CPU memory, if so
        configured."""
        return nullcontext()

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name, gathered a unit at a time if the sampler does not hold them.
        Collective."""
        if self._buffer.is_filled:
            yield from in_dtype(plain_weights(self.sampler), dtype)
        elif self.policy.adapter is None:
            yield from in_dtype(_of_model(self.split.whole()), dtype)
        else:
            self.split.let_go()
            for unit in self.split.units:
                with self.split.unit(unit) as tensors, self._buffer.lent(tensors):
                    yield from in_dtype(plain_weights(self.sampler, among=tensors), dtype)

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """Return the adapter of the sampler: of the base a layer at a time is gathered, of the adapter only
        its matrices."""
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
        """Return this rank's parts of the base of an adapter, and of the reference."""
        trained = self.trained()
        own = {n: t for n, t in self.split.held().items() if n not in trained}
        reference = {} if self.split_reference is None else self.split_reference.held()
        return {**own, **{f"reference {n}": t for n, t in reference.items()}}

    def trained(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of what is trained."""
        held = self.split.held()
        return {n: held[n] for n, p in self.policy.named_parameters() if p.requires_grad}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return checksums of whole tensors, from the parts of all ranks. Collective."""
        return whole_checksums(tensors, self._reduction)

    def model_writer(self, text: TextFiles, base: str | None) -> ModelWriter:
        """Return what writes the model: each rank writes its tensors from the CPU, the first rank an
        adapter."""
        adapter = self.sampler.adapter
        if adapter is not None:
            own: dict[str, Tensor] = {}
            for name, tensor in self.split.each_whole(list(self.trained())):
                if self.dp_rank == 0:
                    own[saved_name(name.removeprefix("model."))] = tensor.detach().to("cpu", copy=True)
            assert self.dp_rank or own.keys() == adapter_tensors(adapter).keys(), "peft saves other tensors"
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
    """Return a policy's tensors by the names that they have in its model."""
    return ((name.removeprefix("model."), tensor) for name, tensor in named)
