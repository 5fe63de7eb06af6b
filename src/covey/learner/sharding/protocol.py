"""The protocol of a policy that is split over ranks, by FSDP or by DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from covey.checkpoint.shards import SavedShards, Shard
from covey.models.policy import Policy


class Split(Protocol):
    """A policy of which this rank holds a part of every tensor. Tensors have the policy's names."""

    policy: Policy

    def held(self) -> Mapping[str, Tensor]:
        """Return this rank's parts, not copied: FSDP's in float32, DeepSpeed's as they compute."""
        ...

    def masters(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the trained tensors in float32, not copied."""
        ...

    @property
    def units(self) -> Collection[str]:
        """Return the names of the decoder layers, and "" for what is in none of them."""
        ...

    def unit(self, name: str) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Return a context within which the tensors of a unit are whole and in the dtype that they compute
        in. Called when passes have freed theirs. Collective."""
        ...

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Return every tensor whole and in the dtype that it computes in, a unit at a time; its memory is
        freed with its unit. Collective."""
        ...

    def each_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Return these tensors whole, one at a time, in the dtype that they are held in; no other one is
        gathered. Collective."""
        ...

    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's parts of trained tensors with those of whole ones."""
        ...

    def let_go(self) -> None:
        """Free the weights that a pass without a backward pass leaves gathered."""
        ...

    def shards(self, tensors: Mapping[str, Tensor]) -> Iterable[Shard]:
        """Return what this rank saves of tensors called NAME or `KIND/NAME`, which are split as the parameter
        NAME is. Of equal shards on several ranks the first rank saves its own. Collective."""
        ...

    def own_shards(self, saved: SavedShards) -> Mapping[str, Tensor]:
        """Return this rank's shards of what any number of ranks have saved."""
        ...
