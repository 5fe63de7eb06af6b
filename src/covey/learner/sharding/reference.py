"""A reference that has an adapter of its own or follows the policy, where the policy is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.offload import Parked
from covey.learner.reference import MovingReference
from covey.learner.sharding.protocol import Split
from covey.models.policy import Policy
from covey.options.algorithm import AlgorithmOptions


class SplitReference(MovingReference):
    """This rank's parts of the trained tensors as they are when it is made, in float32; for a pass they take
    the place of the policy's."""

    def __init__(self, split: Split, options: AlgorithmOptions) -> None:
        self._split, self._policy, self._options = split, split.policy, options
        self._float32 = {n: t.detach().clone() for n, t in split.masters().items()}
        self._computing = {}
        self.parked = Parked()

    @contextmanager
    def view(self) -> Iterator[Policy]:
        """The policy with the reference's parts, for passes without gradient."""
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
        """Change the parts, while no weights are gathered from them."""
        self._split.let_go()
        if self._policy.device.type == "cuda":
            # It may still be copying offloaded parts, which the CPU is about to overwrite.
            torch.cuda.synchronize(self._policy.device)
        for name, part in own.items():
            part.copy_(values[name])

    def pieces(self, rank: int, world: int) -> Iterable[Piece]:
        """This rank's share of the whole tensors. Collective."""
        return self._split.pieces(self.state())

    def load_pieces(self, saved: SavedPieces) -> None:
        """The parts of this rank."""
        self.load_state(self._split.own_parts(saved))
