"""Decoding by the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from covey.kernels.protocol import Cache, CacheLayout, SampledModel


@dataclass(frozen=True, slots=True)
class ModuleDecoder:
    """As `Decoder` says, for any model."""

    model: SampledModel
    is_compiled = False
    sampler = None

    def hidden(self, tokens_n: Tensor, positions_n: Tensor, layout: CacheLayout) -> Tensor:
        """As the protocol says."""
        return self.model.hidden(tokens_n, positions_n, layout)

    def logits(self, hidden_nE: Tensor) -> Tensor:
        """As the protocol says."""
        return self.model.logits(hidden_nE)

    def copy_rows(self, cache: Cache, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """As the protocol says."""
        cache.copy_rows(sources, targets, columns)
