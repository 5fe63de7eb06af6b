"""The segments of a stream, as attention in C takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.types import StreamSegment

_SEGMENTS = ("start", "length", "before", "parent")
Attention = structure(
    "Attention",
    **dict.fromkeys(("heads", "key_heads", "head_width", "families", "threads", "longest"), INT),
    scaling=FLOAT,
    **dict.fromkeys(("family", *_SEGMENTS, "x", "out", "lse", "grad", "grad_x", "held"), POINTER),
    past=INT,
    **dict.fromkeys(("past_keys", "grad_past_keys"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Families:
    """The segments of a stream as int64: of each its place, its length, the tokens of its ancestors and its
    parent (-1 for a root), (4, segments); and where each family, a root with what grows from it, begins among
    them. `longest` is the longest way from a root to the end of a segment, in tokens."""

    family: Tensor
    segments: Tensor
    longest: int

    @classmethod
    def of(cls, segments: Sequence[StreamSegment]) -> Families:
        """From segments in the order of the stream."""
        before: list[int] = []
        for segment in segments:
            above = segment.parent
            before.append(0 if above is None else before[above] + segments[above].length)
        starts, lengths = [s.start for s in segments], [s.length for s in segments]
        parents = [-1 if s.parent is None else s.parent for s in segments]
        return cls(
            family=torch.tensor([*(i for i, parent in enumerate(parents) if parent < 0), len(segments)]),
            segments=torch.tensor([starts, lengths, before, parents]),
            longest=max(map(int.__add__, before, lengths)),
        )

    def arguments(self, *, heads: int, key_heads: int, head_width: int, scaling: float) -> Any:
        """What says of a call which stream it is and what its heads are; the tensors have to live as long."""
        return Attention(
            heads=heads,
            key_heads=key_heads,
            head_width=head_width,
            families=self.family.shape[0] - 1,
            threads=torch.get_num_threads(),
            longest=self.longest,
            scaling=scaling,
            family=place(self.family),
            **{name: place(row) for name, row in zip(_SEGMENTS, self.segments.unbind(), strict=True)},
        )
