"""References with an adapter of their own, or that follow the policy, where it is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.checkpoint.shards import SavedShards, Shard
from covey.learner.offload import Offloaded
from covey.learner.reference import MovingReference
from covey.learner.sharding.protocol import Split
from covey.models.policy import Policy
from covey.options.algorithm import AlgorithmOptions


class SplitReference(MovingReference):
    """Holds this rank's parts of the trained tensors in float32, as they are when it is made. For a pass they
    replace the policy's."""

    def __init__(self, split: Split, options: AlgorithmOptions) -> None:
        self._split, self._policy, self._options = split, split.policy, options
        self._float32 = {n: t.detach().clone() for n, t in split.masters().items()}
        self._computing = {}
        self.offloaded = Offloaded()

    @contextmanager
    def view(self) -> Iterator[Policy]:
        """Within it, the policy has the reference's parts, for passes without gradient."""
        own = {n: t for n, t in self._split.held().items() if n in self._float32}
        policys = {n: t.clone() for n, t in own.items()}
        is_training = self._policy.training
        self._policy.eval()
        try:
            self._write(own, self.state())
            yield self._policy
        finally:
            self._write(own, policys)
            self._policy.train(is_training)

    @torch.no_grad()
    def _write(self, own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Overwrite the parts `own` with `values`, while no weights are gathered from them."""
        self._split.let_go()
        if self._policy.device.type == "cuda":
            # It may still be copying offloaded parts, which the CPU is about to overwrite.
            torch.cuda.synchronize(self._policy.device)
        for name, part in own.items():
            part.copy_(values[name])

    def shards(self, rank: int, world: int) -> Iterable[Shard]:
        """Return this rank's share of the whole tensors. Collective."""
        return self._split.shards(self.state())

    def load_shards(self, saved: SavedShards) -> None:
        """Load the parts of this rank."""
        self.load_state(self._split.own_shards(saved))
