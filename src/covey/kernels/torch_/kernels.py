"""Everything by torch and the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from covey.kernels.gpu.recordings import Recordings
from covey.kernels.products import TorchProducts
from covey.kernels.protocol import Decoder, HeadBlocks, HeadSpec, Products, SampledModel, StreamAttention
from covey.kernels.torch_.decoder import ModuleDecoder
from covey.kernels.torch_.head import TorchHead
from covey.kernels.torch_.stream import MaskedRows
from covey.types import MicroBatch, StreamSegment


class TorchKernels:
    """As `Kernels` says. What other kernels do not compute themselves, they leave to this."""

    name = "torch"
    products: Products = TorchProducts()
    stride = 1

    @property
    def is_compiled(self) -> bool:
        """No."""
        return False

    def prepare(self, model: nn.Module) -> None:
        """Nothing is changed."""

    def pad(self, micro: MicroBatch, weight_VD: Tensor, spec: HeadSpec) -> MicroBatch:
        """Any size will do."""
        return micro

    def stream(
        self, segments: Sequence[StreamSegment], first: int, device: torch.device | str
    ) -> StreamAttention:
        """Padded rows."""
        return MaskedRows(segments, first, device)

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> HeadBlocks:
        """In float32."""
        return TorchHead(spec)

    def decoder(self, model: SampledModel, num_positions: int, former: Decoder | None = None) -> Decoder:
        """The model's own modules; the same object again, as recordings are of one decoder."""
        is_same = isinstance(former, ModuleDecoder) and former.model is model
        return former if former is not None and is_same else ModuleDecoder(model)

    def compiles(self, model: SampledModel) -> bool:
        """No."""
        return False

    def recordings(self) -> Recordings | None:
        """None: every step is launched anew."""
        return None
