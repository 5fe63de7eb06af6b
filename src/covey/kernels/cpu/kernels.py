"""Kernels for a CPU: what the library in C serves, and torch for all else."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.cpu.attention import CompiledStream
from covey.kernels.cpu.decoder import CompiledLlama, compiled_llama
from covey.kernels.cpu.head import CompiledHead, serves
from covey.kernels.llama.decoder import llama_decoder
from covey.kernels.products import FastProducts, is_kept_by_size, use_fast_products
from covey.kernels.protocol import Decoder, HeadBlocks, HeadSpec, Products, SampledModel, StreamAttention
from covey.kernels.sizes import in_few_sizes
from covey.kernels.torch_.kernels import TorchKernels
from covey.types import MicroBatch, StreamSegment

# mallopt(3) of the GNU C library, and what it is set to in bytes.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = (-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)


class CpuKernels(TorchKernels):
    """As `Kernels` says. The `library` is None where there is no C compiler."""

    name = "cpu"
    products: Products = FastProducts()

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self.library = library

    @property
    def is_compiled(self) -> bool:
        """Where there is a library."""
        return self.library is not None

    def __deepcopy__(self, memo: Any) -> CpuKernels:
        """A library cannot be copied, and need not be: it holds nothing of a model."""
        return self

    def prepare(self, model: nn.Module) -> None:
        """Linear layers multiply by the faster way; the process keeps memory that it frees."""
        use_fast_products(model)
        keep_freed_memory()

    def pad(self, micro: MicroBatch, weight_VD: Tensor, spec: HeadSpec) -> MicroBatch:
        """For oneDNN, which compiles a kernel for each size."""
        block = spec.block_for(weight_VD)[0] if is_kept_by_size(weight_VD) else None
        return in_few_sizes(micro, block=block)

    def stream(
        self, segments: Sequence[StreamSegment], first: int, device: torch.device | str
    ) -> StreamAttention:
        """Plain attention in C."""
        rows = super().stream(segments, first, device)
        return rows if self.library is None else CompiledStream(self.library, segments, rows)

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> HeadBlocks:
        """A head without bias and soft cap in C."""
        if self.library is not None and serves(weight_VD, bias_V, spec):
            return CompiledHead(self.library, spec)
        return super().head(weight_VD, bias_V, spec)

    def compiles(self, model: SampledModel) -> bool:
        """Models of the Llama family, where there is a library."""
        return self.library is not None and compiled_llama(self.library, model, 1) is not None

    def decoder(self, model: SampledModel, num_positions: int, former: Decoder | None = None) -> Decoder:
        """The Llama family in C, else in few calls, else the modules."""
        compiled = None
        if self.library is not None:
            own = former if isinstance(former, CompiledLlama) else None
            compiled = compiled_llama(self.library, model, num_positions, own)
        short = compiled or llama_decoder(model, num_positions, former)
        return short or super().decoder(model, num_positions, former)


def keep_freed_memory() -> None:
    """Have freed memory used again before more is asked of the system.

    Otherwise memory of tensors of a few MiB goes back to the system and comes again, filled with zeros, many
    times a step. Blocks of 32 MiB and more still go back at once. Elsewhere than on the GNU C library nothing
    changes.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for parameter, value in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD):
            library.mallopt(parameter, value)
