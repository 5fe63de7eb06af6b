"""Carries what a draw of tokens reads beside its logits (`Filters`) and what it returns (`Drawn`).

Axes: n rows, V vocabulary, W the int32 of a bitmap over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Holds the filters of rows as `SamplingParams` defines them, (n,) each: top_p float64, top_k int64,
    min_p float32.

    `may_wait` says that the host may read tensors while it computes: on a CPU, where nothing is recorded.
    """

    top_p_n: Tensor
    top_k_n: Tensor
    min_p_n: Tensor
    may_wait: bool = False

    @classmethod
    def of(cls, tensors: Iterable[Tensor], *, may_wait: bool) -> Filters:
        """Build filters from `tensors`, (n,) each, in the order of that property."""
        top_p_n, top_k_n, min_p_n = tensors
        return cls(top_p_n, top_k_n, min_p_n, may_wait)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return top_p, top_k and min_p, (n,) each."""
        return self.top_p_n, self.top_k_n, self.min_p_n

    @property
    def is_on_n(self) -> Tensor:
        """Return (n,) bool: whether each row has a filter."""
        return (self.top_p_n < 1) | (self.top_k_n > 0) | (self.min_p_n > 0)


class Drawn(NamedTuple):
    """Holds ids (n,) and logprobs (n,) of drawn tokens, and the sets that filters left to draw them from, as
    bitmaps (n, W): bit b of int32 w stands for id 32 w + b. Without filters `kept` is None. Draws of
    several tokens have one more axis, behind n or before it."""

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None = None
