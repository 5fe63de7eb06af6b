"""Policies whose tensors DeepSpeed has split over ranks (ZeRO-3): their parts, and whole tensors of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.checkpoint.shards import SavedShards, Shard
from covey.learner.sharding.layers import decoder_layers
from covey.learner.sharding.rows import ReadRows

if TYPE_CHECKING:
    from covey.learner.backends.deepspeed import ZeroEngine


class Partitioned:
    """Implements `Split` for the policy of an engine of stage 3."""

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
        """Within it, the tensors of a unit are whole, by name, in the dtype that they compute in.
        Collective."""
        own = dict(self.policy.named_parameters())
        names = self.units[name]
        with self.engine.gathered([own[n] for n in names]):
            yield {n: own[n].data for n in names}

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor whole and as it computes, by name: a decoder layer at a time, and those outside
        of layers one at a time. Collective."""
        self.let_go()
        for name in self.units:
            if name:
                with self.unit(name) as tensors:
                    yield from tensors.items()
        yield from self.each_whole(self.units[""])

    def each_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors whole and as they compute, one at a time. Collective."""
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
        """Return the parts of this rank as they compute."""
        return self.engine.held()

    def masters(self) -> Mapping[str, Tensor]:
        """Return the float32 parts of the trained tensors."""
        return self.engine.masters

    def shards(self, tensors: Mapping[str, Tensor]) -> list[Shard]:
        """Return this rank's share of the whole tensors. Collective."""
        return self.engine.fragments.shards(tensors)

    def own_shards(self, saved: SavedShards) -> Mapping[str, Tensor]:
        """Return the parts of this rank."""
        return self.engine.fragments.own_shards(saved)
