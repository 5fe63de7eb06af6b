"""Which implementation computes the attention of a stream while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from covey.kernels.compiler import has_compiler
from covey.kernels.protocol import Kernels, Layout
from covey.kernels.torch_.attention import attend_eager
from covey.kernels.torch_.stream import MaskedRows
from covey.models.attention import StreamLayout
from covey.models.prefix import Prefix
from covey.types import StreamSegment

AttentionKind = Literal["sdpa", "flex", "flash_attn", "eager"]


def stream_layout(
    kind: AttentionKind,
    segments: Sequence[StreamSegment],
    device: torch.device | str,
    kernels: Kernels,
    prefix: Prefix | None = None,
) -> Layout:
    """The attention of one stream, which may go on from a `prefix`; flex attention is compiled on a GPU, and
    sdpa is what the kernels make of it."""
    first = 0 if prefix is None else prefix.first
    match kind:
        case "flex":
            from covey.models.flex import FlexLayout

            return FlexLayout(segments, device, compiled=torch.device(device).type == "cuda", prefix=prefix)
        case "flash_attn":
            from covey.models.flash import FlashLayout

            return FlashLayout(segments, device, prefix)
        case "eager":
            rows = MaskedRows(segments, first, device, attend_eager)
            return StreamLayout(segments, device, prefix, rows)
        case "sdpa":
            return StreamLayout(segments, device, prefix, kernels.stream(segments, first, device))


def automatic(device: torch.device) -> AttentionKind:
    """What `auto` tries first: flex attention where torch compiles it for the device, else masked rows."""
    return "flex" if has_compiler(device) else "sdpa"
