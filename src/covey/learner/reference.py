"""A reference that follows the policy: every so many optimizer steps it is moved towards the policy's
weights.

Source: TR-DPO (arXiv:2404.09656), its soft and, at alpha 1, its hard update. What is moved are the trained
tensors. Of all weights that is the mean of two models. Of an adapter it is the mean of each factor, whose
product is not the mean of the products: the two differ by alpha (1 - alpha) (B - B') (A - A') at each sync,
of second order in what the policy has moved since the last one, and by nothing at alpha 1. The exact mean is
a matrix of the size of the weight that the adapter is for, and of DoRA no sum at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.checkpoint.shards import SavedShards, Shard, share_of
from covey.learner.offload import Offloaded
from covey.models.lora import adapter_parameters
from covey.models.policy import Policy
from covey.options.algorithm import AlgorithmOptions


class MovingReference:
    """With `sync_ref_model`, every `ref_model_sync_steps` steps its tensors become `ref_model_mixup_alpha` x
    policy's + (1 - `ref_model_mixup_alpha`) x their own; without it they stay, as those of the adapter that a
    run started from.

    They are float32 whatever is computed in: in bfloat16 most of a small move is rounded away. Taken from
    `reference`, or from the adapter of `policy`, while their weights are float32 and those of the first
    model; where `dtype` is lower the caller casts the reference's parameters afterwards.
    """

    def __init__(
        self, policy: Policy, reference: Policy | None, options: AlgorithmOptions, *, dtype: torch.dtype
    ) -> None:
        self._policy, self._reference, self._options = policy, reference, options
        self.offloaded = Offloaded()
        self._float32: dict[str, Tensor] = {}
        self._computing: dict[str, Tensor] = {}
        lora = adapter_parameters(policy)
        trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
        for name, parameter in (reference or policy).named_parameters():
            if name not in trained:
                continue
            if reference is not None:
                self._float32[name], self._computing[name] = parameter.detach(), parameter
            else:
                own = parameter.detach().clone()
                self._float32[name] = own
                self._computing[name] = own if name in lora else own.to(dtype)

    @property
    def moves(self) -> bool:
        """Whether it follows the policy at all."""
        return self._options.sync_ref_model

    @contextmanager
    def view(self) -> Iterator[Policy]:
        """Within it, the reference is a model for passes without gradient; its tensors have to be on the
        device."""
        if self._reference is not None:
            yield self._reference
            return
        trained = {n: p for n, p in self._policy.named_parameters() if n in self._computing}
        held = {name: parameter.data for name, parameter in trained.items()}
        is_training = self._policy.training
        self._policy.eval()
        try:
            for name, parameter in trained.items():
                parameter.data = self._computing[name]
            yield self._policy
        finally:
            for name, parameter in trained.items():
                parameter.data = held[name]
            self._policy.train(is_training)

    @torch.no_grad()
    def move(self, step: int, masters: Iterable[tuple[str, Tensor]]) -> bool:
        """Move the tensors towards the masters, which are read one after the other, if a sync is due after
        this step; says whether it was."""
        if not self.moves or step % self._options.ref_model_sync_steps:
            return False
        with self.offloaded.on_device():
            for name, master in masters:
                self._float32[name].lerp_(master, self._options.ref_model_mixup_alpha)
            self._cast()
        return True

    def last_sync(self, step: int) -> int:
        """The last step up to `step` after which there was a sync; 0 before there was one."""
        return step - step % self._options.ref_model_sync_steps

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that change at a sync, and only there: in float32, and in a lower dtype where
        the reference computes in one."""
        low = {f"{n} as it computes": t for n, t in self._computing.items() if t.dtype != torch.float32}
        return {n: self.offloaded.read(t) for n, t in {**self._float32, **low}.items()}

    def own_tensors(self) -> Iterable[Tensor]:
        """Return its tensors that are not the policy's, as they lie on the device."""
        return [*self._float32.values(), *self._computing.values()]

    def state(self) -> Mapping[str, Tensor]:
        """Return the float32 tensors."""
        return {n: self.offloaded.read(t) for n, t in self._float32.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave."""
        with self.offloaded.on_device():
            for name, tensor in self._float32.items():
                tensor.copy_(tensors[name])
            self._cast()

    def shards(self, rank: int, world: int) -> Iterable[Shard]:
        """Return this rank's part of the float32 tensors, which every rank holds."""
        return share_of(self.state(), rank, world)

    def load_shards(self, saved: SavedShards) -> None:
        """Go on with what all ranks saved."""
        self.load_state(saved)

    def _cast(self) -> None:
        for name, tensor in self._computing.items():
            if tensor.dtype != torch.float32:
                tensor.copy_(self._float32[name])
