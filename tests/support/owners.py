"""An owner of weights that are given by name, for what watches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from covey.checksums import checksum


@dataclass(frozen=True)
class Held:
    """Weights of one process."""

    of_frozen: Mapping[str, Tensor] = field(default_factory=dict)
    of_trained: Mapping[str, Tensor] = field(default_factory=dict)

    def frozen(self) -> Mapping[str, Tensor]:
        """As given."""
        return self.of_frozen

    def trained(self) -> Mapping[str, Tensor]:
        """As given."""
        return self.of_trained

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Those of whole tensors."""
        return [checksum(tensor) for tensor in tensors.values()]
