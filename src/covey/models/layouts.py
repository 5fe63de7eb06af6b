"""Which implementation computes the attention of a stream while training."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch

from covey.kernels.protocol import Kernels, Layout
from covey.kernels.torch_.attention import attend_eager
from covey.kernels.torch_.stream import MaskedRows
from covey.models.attention import StreamLayout
from covey.models.prefix import Prefix
from covey.types import StreamSegment

AttentionKind = Literal["sdpa", "flex", "flash_attn", "eager"]

# Compute capability of the oldest GPU that torch's compiler writes flex attention for with bfloat16.
_FLEX_SINCE = (8, 0)


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
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return "sdpa"
    return "flex" if torch.cuda.get_device_capability(device) >= _FLEX_SINCE else "sdpa"
