"""Norms and gated layers by the kernels of the package liger-kernel, the one module that imports it.

The functions are bound to the modules of one model, and nothing in transformers is replaced. Two kernels of
the package are not taken. Its fused loss: covey's head never builds a batch of logits either. Its rotary
embedding: transformers looks that function up by name, so it could only be exchanged for every model of the
process, and it rotates in place what selective recomputation keeps.
"""

from __future__ import annotations

import importlib.util
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from covey.plan.kernels import LIGER_FAMILIES


def wants_liger(asked: str, model: nn.Module, device: torch.device) -> bool:
    """Whether `use_liger_kernel` means yes: `auto` does where device, package and model allow it.

    The plan has refused `true` wherever one of them does not.
    """
    if asked != "auto":
        return asked == "true"
    config: Any = model.config
    is_there = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    return is_there and config.model_type in LIGER_FAMILIES


def use_liger(model: nn.Module) -> int:
    """Put the kernels into a model of a known family; returns how many modules they are in.

    Adapters stay what they are: the linear layers of a gated layer are called as modules.
    """
    from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        # Rounded before the weight, as Llama's norm is; not in place, for others may read the gradient.
        return liger_rms_norm(  # type: ignore[no-any-return]
            hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False
        )

    def gated(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    count = 0
    for module in model.modules():
        kind = type(module)
        if not kind.__module__.startswith("transformers.models."):
            continue
        if kind.__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
        elif kind.__name__.endswith("MLP") and _is_silu(module):
            module.forward = MethodType(gated, module)
        else:
            continue
        count += 1
    return count


def _is_silu(module: nn.Module) -> bool:
    config: Any = module.config
    return config.hidden_act in ("silu", "swish")
