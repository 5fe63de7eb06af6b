"""A policy whose tensors DeepSpeed has split over ranks (ZeRO-3): its parts, and whole tensors of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.offload import Parked
from covey.learner.reference import MovingReference
from covey.learner.sharding.build import ReadRows
from covey.learner.sharding.units import decoder_layers
from covey.models.policy import Policy

if TYPE_CHECKING:
    from covey.learner.backends.deepspeed import ZeroEngine


class Partitioned:
    """The policy of an engine of stage 3."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine, self.policy = engine, engine.policy

    def let_go(self) -> None:
        """Free the weights that passes have left gathered."""
        self.engine.let_go()

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole and as it computes, by name, a decoder layer at a time. Collective."""
        self.let_go()
        own = dict(self.policy.named_parameters())
        groups = [[n for n in own if n.startswith(f"{prefix}.")] for prefix in decoder_layers(self.policy)]
        in_layers = {name for names in groups for name in names}
        for names in (*groups, *([n] for n in own if n not in in_layers)):
            with self.engine.gathered([own[n] for n in names]):
                for name in names:
                    yield name, own[name].data

    @torch.no_grad()
    def fill_masters(self, read: ReadRows) -> None:
        """Give the masters the weights as they were saved: parts in a lower dtype have lost digits."""
        for name, master in self.engine.masters.items():
            fragment = self.engine.fragments[name]
            rows = read(name, *fragment.rows) if fragment.count else None
            if rows is not None:
                master.copy_(fragment.of_rows(rows))

    @torch.no_grad()
    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Write parts of whole tensors over those of the same name."""
        self.let_go()
        held = self.engine.held()
        for name, value in values.items():
            part = self.engine.fragments[name].of(value)
            self.engine.masters[name].copy_(part)
            held[name].copy_(part)


class PartitionedReference(MovingReference):
    """This rank's parts of the trained tensors as they are when it is made, in float32; for a pass they take
    the place of the policy's."""

    def __init__(self, partitioned: Partitioned, *, every: int, alpha: float) -> None:
        self._partitioned, self._policy = partitioned, partitioned.policy
        self._every, self._alpha = every, alpha
        self._float32 = {n: m.detach().clone() for n, m in partitioned.engine.masters.items()}
        self._computing = {}
        self.parked = Parked()

    @contextmanager
    def view(self) -> Iterator[Policy]:
        """The policy with the reference's parts, for passes without gradient."""
        own = {n: t for n, t in self._partitioned.engine.held().items() if n in self._float32}
        held = {n: t.clone() for n, t in own.items()}
        is_training = self._policy.training
        self._policy.eval()
        try:
            self._write(own, self._float32)
            yield self._policy
        finally:
            self._write(own, held)
            self._policy.train(is_training)

    @torch.no_grad()
    def _write(self, own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Change the parts, while no weights are gathered."""
        self._partitioned.let_go()
        for name, part in own.items():
            part.copy_(values[name])

    def pieces(self, rank: int, world: int) -> Iterable[Piece]:
        """This rank's share of the whole tensors. Collective."""
        return self._partitioned.engine.fragments.pieces(self._float32)

    def load_pieces(self, saved: SavedPieces) -> None:
        """The parts of this rank."""
        self.load_state(self._partitioned.engine.fragments.own(saved))
