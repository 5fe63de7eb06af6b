"""Weights that bitsandbytes has packed (QLoRA, arXiv:2305.14314): how they compute, and what they stand for.

A packed weight is a parameter of bytes with constants beside it. It is never cast, merged or written over: a
layer makes its numbers for one product and lets them go. This is the one module that imports bitsandbytes.

Axes: N outputs, K inputs of a layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.config.quantization import Quantization

# By name, so that nothing has to be imported to know that a weight is none of them.
_PACKED = frozenset({"Params4bit", "Int8Params"})
# An 8-bit weight is a whole number times the constant of its row, divided by this.
_LARGEST = 127.0


def is_packed(parameter: Tensor) -> bool:
    """Whether a parameter is a packed weight."""
    return type(parameter).__name__ in _PACKED


def cast_unpacked(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast parameters in place, but for packed weights."""
    for parameter in parameters:
        if not is_packed(parameter):
            parameter.data = parameter.data.to(dtype)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the weight that a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if state is None else state.shape)


def as_stored(layer: Any, whole_NK: Tensor) -> Tensor:
    """The weight of a packed layer as the files of its model have it: GPT-2's are transposed."""
    return whole_NK.T if layer.source_cls.__name__ == "Conv1D" else whole_NK


@torch.no_grad()
def unpacked(parameter: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight (N, K) that a packed one stands for."""
    if type(parameter).__name__ == "Int8Params":
        return _of_int8(parameter.data, parameter.SCB, dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state).to(dtype)  # type: ignore[no-any-return]


def bytes_of(name: str, parameter: Any) -> dict[str, Tensor]:
    """Everything that a packed weight is made of, by name: its bytes, whatever dtype they are stored as, and
    its constants."""
    found = {name: parameter.detach().view(torch.uint8)}
    if type(parameter).__name__ == "Int8Params":
        return found | {f"{name}.SCB": parameter.SCB}
    state = parameter.quant_state
    found[f"{name}.absmax"] = state.absmax
    if state.nested:
        found |= {f"{name}.nested_absmax": state.state2.absmax, f"{name}.offset": state.offset}
    return found


def loading_arguments(
    quantization: Quantization, whole: Sequence[str], device: torch.device, *, is_stored: bool
) -> dict[str, Any]:
    """The arguments with which transformers packs the linear layers of a model as it reads them onto a
    device, but for those whose names end in one of `whole`. Files that are stored packed say it all."""
    from transformers import BitsAndBytesConfig

    # Its 8-bit product warns of each cast; the one below is used in its place.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    found: dict[str, Any] = {"device_map": {"": device}}
    if not is_stored:
        said = {**quantization.as_json(), "llm_int8_skip_modules": list(whole)}
        found["quantization_config"] = BitsAndBytesConfig.from_dict(said)
    return found


def compute_in(model: nn.Module, quantization: Quantization, dtype: torch.dtype) -> None:
    """Let the packed layers of a model multiply in a dtype, or in that of the quantization.

    bitsandbytes' own layers are replaced. Those of 8 bits round the inputs by what else is in the batch, so a
    token's logprob would depend on the tokens beside it; those of 4 bits change bias and packing in place.
    """
    four, eight = _layers()
    asked = quantization.compute_dtype
    own = dtype if asked == "auto" else getattr(torch, asked)
    for layer in model.modules():
        # Not what a layer of peft's passes on of the one within it.
        weight: Any = layer._parameters.get("weight")
        name = type(weight).__name__
        if name == "Params4bit":
            layer.__class__, layer.compute_dtype = four, own  # type: ignore[assignment]
            # What the backward pass makes of the bytes is what the forward pass has multiplied with.
            weight.quant_state.dtype = own
        elif name == "Int8Params":
            layer.__class__ = eight
            weight.CB = None


def coarsest_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The dtype that rounds most of those that a model computes in: `dtype`, and those in which its packed
    layers multiply."""
    own = (getattr(layer, "compute_dtype", None) for layer in model.modules())
    found = [dtype, *(one for one in own if isinstance(one, torch.dtype))]
    return max(found, key=lambda one: torch.finfo(one).eps)


@functools.cache
def _layers() -> tuple[type[nn.Module], type[nn.Module]]:
    """The layers of 4 and of 8 bits, which peft takes for those of bitsandbytes."""
    import bitsandbytes

    class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc, name-defined]
        """Weights of 4 bits, multiplied by bitsandbytes."""

        def forward(self, x: Tensor) -> Tensor:
            """x @ weight.T + bias, in the compute dtype."""
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            inner, weight = x.to(self.compute_dtype), cast(Any, self.weight)
            out = bitsandbytes.matmul_4bit(inner, weight, bias=bias, quant_state=weight.quant_state)
            return out.to(x.dtype)  # type: ignore[no-any-return]

    class Linear8bit(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc, name-defined]
        """Weights of 8 bits, multiplied in the dtype of what comes in."""

        def forward(self, x: Tensor) -> Tensor:
            """x @ weight.T + bias."""
            weight = cast(Any, self.weight)
            out = _Int8Product.apply(x, weight.data, weight.SCB)
            return out if self.bias is None else out + self.bias.to(x.dtype)  # type: ignore[no-any-return]

    return Linear4bit, Linear8bit


class _Int8Product(torch.autograd.Function):
    """A product with a weight that is made anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_NK: Tensor, scale_N: Tensor) -> Tensor:
        ctx.save_for_backward(packed_NK, scale_N)
        return F.linear(x, _of_int8(packed_NK, scale_N, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        packed_NK, scale_N = ctx.saved_tensors
        return grad @ _of_int8(packed_NK, scale_N, grad.dtype), None, None


def _of_int8(packed_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return packed_NK.to(dtype).mul_(scale_N.unsqueeze(1) / _LARGEST)
