"""Kernels for a GPU: few calls for each token, recorded and played."""

from __future__ import annotations

from typing import Any

from covey.kernels.gpu.recordings import Recordings
from covey.kernels.llama.decoder import llama_decoder
from covey.kernels.protocol import Decoder, SampledModel
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

    def decoder(self, model: SampledModel, num_positions: int, former: Decoder | None = None) -> Decoder:
        """The Llama family in few calls, else the modules."""
        short = llama_decoder(model, num_positions, former)
        return short or super().decoder(model, num_positions, former)

    def recordings(self) -> Recordings | None:
        """As they were given, else new ones."""
        return Recordings() if self._recordings is None else self._recordings
