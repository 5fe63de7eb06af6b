"""A reference that has an adapter of its own or follows the policy, where the policy is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.offload import Parked
from covey.learner.reference import MovingReference
from covey.learner.sharding.units import Sharded, local
from covey.models.policy import Policy


class ShardedReference(MovingReference):
    """This rank's rows of the trained tensors as they are when it is made, in float32; for a pass they take
    the place of the policy's."""

    def __init__(self, sharded: Sharded, *, every: int, alpha: float) -> None:
        self._sharded, self._policy = sharded, sharded.policy
        self._every, self._alpha = every, alpha
        self._trained = {n: local(p) for n, p in sharded.parameters.items() if p.requires_grad}
        self._float32 = {n: t.clone() for n, t in self._trained.items()}
        self._computing = {}
        self.parked = Parked()

    @contextmanager
    def view(self) -> Iterator[Policy]:
        """The policy with the reference's rows, for passes without gradient."""
        held = {n: t.clone() for n, t in self._trained.items()}
        is_training = self._policy.training
        self._policy.eval()
        self._settle()
        try:
            with torch.no_grad():
                for name, rows in self._trained.items():
                    rows.copy_(self.parked.look(self._float32[name]))
            yield self._policy
        finally:
            self._settle()
            with torch.no_grad():
                for name, rows in self._trained.items():
                    rows.copy_(held[name])
            self._sharded.let_go()
            self._policy.train(is_training)

    def _settle(self) -> None:
        """Wait for a GPU's copies of offloaded rows, which the CPU is about to write."""
        device = self._sharded.sharding.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def pieces(self, rank: int, world: int) -> Iterable[Piece]:
        """The rows of this rank."""
        return self._sharded.pieces(self.state())

    def load_pieces(self, saved: SavedPieces) -> None:
        """The rows of this rank."""
        self.load_state(self._sharded.own_rows(saved))
