"""Which kernels serve a device."""

from __future__ import annotations

from typing import Literal

from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.cpu.library import open_library
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.protocol import Kernels
from covey.kernels.torch_.kernels import TorchKernels

KernelsName = Literal["auto", "torch"]


def choose_kernels(asked: KernelsName, device_type: str) -> Kernels:
    """Those that `--kernels` asks for; `auto` are those of the device."""
    if asked == "torch":
        return TorchKernels()
    match device_type:
        case "cpu":
            return CpuKernels(open_library())
        case "cuda":
            return GpuKernels()
        case _:
            return TorchKernels()
