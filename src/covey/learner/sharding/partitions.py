"""A policy whose tensors DeepSpeed has split over ranks (ZeRO-3): its parts, and whole tensors of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.sharding.layers import decoder_layers
from covey.learner.sharding.rows import ReadRows

if TYPE_CHECKING:
    from covey.learner.backends.deepspeed import ZeroEngine


class Partitioned:
    """The policy of an engine of stage 3 as `Split` says."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine, self.policy = engine, engine.policy
        names = [n for n, _ in self.policy.named_parameters()]
        self.units = {p: [n for n in names if n.startswith(f"{p}.")] for p in decoder_layers(self.policy)}
        in_layers = {n for own in self.units.values() for n in own}
        self.units[""] = [n for n in names if n not in in_layers]

    def let_go(self) -> None:
        """Free the weights that passes have left gathered."""
        self.engine.let_go()

    @contextmanager
    def unit(self, name: str) -> Iterator[dict[str, Tensor]]:
        """The tensors of a unit whole and as they compute, by name, within it. Collective."""
        own = dict(self.policy.named_parameters())
        names = self.units[name]
        with self.engine.gathered([own[n] for n in names]):
            yield {n: own[n].data for n in names}

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole and as it computes, by name: a decoder layer at a time, and those outside of
        layers one at a time. Collective."""
        self.let_go()
        for name in self.units:
            if name:
                with self.unit(name) as tensors:
                    yield from tensors.items()
        yield from self.each_whole(self.units[""])

    def each_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors whole and as they compute, one at a time. Collective."""
        self.let_go()
        own = dict(self.policy.named_parameters())
        for name in names:
            with self.engine.gathered([own[name]]):
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

    def held(self) -> Mapping[str, Tensor]:
        """The parts of this rank as they compute."""
        return self.engine.held()

    def masters(self) -> Mapping[str, Tensor]:
        """The float32 parts of the trained tensors."""
        return self.engine.masters

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """This rank's share of the whole tensors. Collective."""
        return self.engine.fragments.pieces(tensors)

    def own_parts(self, saved: SavedPieces) -> Mapping[str, Tensor]:
        """The parts of this rank."""
        return self.engine.fragments.own_parts(saved)
