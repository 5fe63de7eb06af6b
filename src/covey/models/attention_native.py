"""The segments of a stream, as attention in C takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from covey.models.native.library import FLOAT, INT, POINTER, structure
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
    """The segments of a stream as arrays of int64: of each its place, its length, the tokens of its ancestors
    and its parent (-1 for a root), row after row; and where each family, a root with what grows from it,
    begins among them, and the last one ends. `longest` is the longest way from a root to the end of a
    segment, in tokens."""

    family: Any
    segments: Any
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
        roots = [i for i, parent in enumerate(parents) if parent < 0]
        return cls(
            family=(INT * (len(roots) + 1))(*roots, len(segments)),
            segments=(INT * (4 * len(segments)))(*starts, *lengths, *before, *parents),
            longest=max(map(int.__add__, before, lengths)),
        )

    def put(self, attention: Any) -> None:
        """Tell a call of its stream; the arrays have to live as long."""
        attention.families, attention.longest = len(self.family) - 1, self.longest
        attention.threads = torch.get_num_threads()
        attention.family = ctypes.addressof(self.family)
        first, row = ctypes.addressof(self.segments), ctypes.sizeof(self.segments) // len(_SEGMENTS)
        for number, name in enumerate(_SEGMENTS):
            setattr(attention, name, first + number * row)
