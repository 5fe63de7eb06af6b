"""Kernels for a GPU: few calls for each token, recorded and played."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from covey.kernels.compiler import has_compiler
from covey.kernels.gpu.recordings import Recordings
from covey.kernels.llama.decoder import llama_decoder
from covey.kernels.protocol import Decoder, HeadBlocks, HeadSpec, SampledModel
from covey.kernels.torch_.kernels import TorchKernels


class GpuKernels(TorchKernels):
    """As `Kernels` says. `recordings` serve one engine; without any, each engine gets CUDA graphs."""

    name = "gpu"
    # The GPU waits whenever the host reads; rows that ended meanwhile have decoded for nothing.
    stride = 8

    def __init__(self, recordings: Recordings | None = None) -> None:
        self._recordings = recordings

    def __deepcopy__(self, memo: Any) -> GpuKernels:
        """Graphs cannot be copied, and are of an engine, not of a policy."""
        return self

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> HeadBlocks:
        """By Triton where it can compile and serves this head."""
        if not has_compiler(weight_VD.device) or bias_V is not None or spec.softcap is not None:
            return super().head(weight_VD, bias_V, spec)
        from covey.kernels.gpu.head import FusedHead

        return FusedHead(spec)

    def decoder(self, model: SampledModel, num_positions: int, former: Decoder | None = None) -> Decoder:
        """The Llama family in few calls, else the modules."""
        short = llama_decoder(model, num_positions, former)
        return short or super().decoder(model, num_positions, former)

    def recordings(self) -> Recordings | None:
        """As they were given, else new ones."""
        return Recordings() if self._recordings is None else self._recordings
