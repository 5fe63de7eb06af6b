"""Streams of few sizes, for libraries that compile a kernel for each size that they meet."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from covey.types import MicroBatch, StreamSegment

# Tokens of a segment of padding: no longer than rows are, as attention computes rows of its longest one.
_SEGMENT = 16
_SMALL = 32


def in_few_sizes(micro: MicroBatch, *, block: int | None = None) -> MicroBatch:
    """The same stream with segments of padding behind it, and contexts from which nothing is predicted, so
    that few sizes ever occur: of tokens, and of contexts, which the head takes in blocks of so many.

    On a CPU oneDNN compiles a kernel for each new size of a product, which takes ten times as long as a
    product of a small model, and keeps it: a quarter of a megabyte. Nothing sees the padding, and its
    gradient is exactly zero. What is multiplied by other means need not be padded: no `block`.
    """
    length, contexts = micro.tokens_T.shape[0], micro.context_U.shape[0]
    end = micro.segments[-1].start + micro.segments[-1].length
    room = _size(length, 32) - length
    last = contexts % block if block else 0
    spare = min(_size(last, 4), block) - last if block else 0
    if not room and not spare:
        return micro
    padding = (
        StreamSegment(start=start, length=min(_SEGMENT, end + room - start))
        for start in range(end, end + room, _SEGMENT)
    )
    return replace(
        micro,
        tokens_T=F.pad(micro.tokens_T, (0, room)),
        positions_T=F.pad(micro.positions_T, (0, room)),
        segments=(*micro.segments, *padding),
        context_U=F.pad(micro.context_U, (0, spare)),
    )


def _size(size: int, sizes: int) -> int:
    """The size that is used for `size`: one of `step_up`, or a small one, for the canary of a publish."""
    return _SMALL if 0 < size <= _SMALL else step_up(size, 64, sizes)


def step_up(size: int, least: int, sizes: int) -> int:
    """The next of so many sizes (a power of two) between two powers of two, in steps of `least` at least."""
    step = max(least, 1 << max(0, size.bit_length() - sizes.bit_length()))
    return -(-size // step) * step
