"""Where torch's compiler and Triton make kernels."""

from __future__ import annotations

import importlib.util

import torch

# Compute capability of the oldest GPU that flex attention is compiled for with bfloat16.
_SINCE = (8, 0)


def has_compiler(device: torch.device) -> bool:
    """Whether kernels are compiled for a device: a GPU of NVIDIA's from Ampere on, and Triton is there."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _SINCE
