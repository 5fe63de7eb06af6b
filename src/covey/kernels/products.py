"""Matrix products: torch's own way, and on a CPU the better one where that is another.

Float32 by oneDNN: MKL, with which torch multiplies, takes a slower path on processors of another make than
its own. oneDNN, which torch carries for its compiler, multiplies large matrices in less time there, at best
in half. Everywhere MKL leaves the heap in pieces behind products with the narrow weights of an adapter on a
wide layer: half a gigabyte in a model of 58 M weights. oneDNN computes in full float32; sums are added in
another order, as between any two shapes of one product. It compiles a kernel for each size of a product that
it meets, and keeps it.

Bfloat16 in float32, block by block, on a processor of the x86 family without AVX-512: no library multiplies
it there, and torch's own loops take 4 to 60 times as long. Sums are float32 and rounded once.
"""

from __future__ import annotations

import platform
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Products of fewer multiplications cost more to hand over than to compute.
_SMALL = 3 << 19
# With weights of fewer rows and columns MKL is as fast, and keeps nothing.
_SMALL_SIDE = 512
# Rows or columns of an adapter's weight at most.
_NARROW_SIDE = 64
# Numbers of a block that is computed in float32 (4 MiB), and its rows at least.
_BLOCK, _BLOCK_ROWS = 1 << 20, 256


def _is_measured() -> bool:
    """Whether this is a machine on which oneDNN was found to be faster: AMD with AVX-512.

    A rule and not a trial at start: a resumed run has to take the same path.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return isfile(info) and "AuthenticAMD" in info.read_text()


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
_IS_FASTER = _HAS_ONEDNN and _is_measured()


def _is_without_bfloat16() -> bool:
    """Whether no library multiplies bfloat16 on this processor."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


_IS_WIDENED = _is_without_bfloat16()


def _widens(weight: Tensor) -> bool:
    """Whether a weight is multiplied in float32, block by block."""
    return _IS_WIDENED and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


def _by_onednn(rows: int, columns: int) -> bool:
    """Whether float32 matrices are multiplied by oneDNN with, or to, a weight of such a shape."""
    is_wide = max(rows, columns) >= _SMALL_SIDE
    return is_wide and (_IS_FASTER or (_HAS_ONEDNN and min(rows, columns) <= _NARROW_SIDE))


def is_kept_by_size(weight: Tensor) -> bool:
    """Whether, on a CPU, a kernel is compiled and kept for each number of rows that a weight multiplies."""
    return _by_onednn(*weight.shape) if weight.dtype == torch.float32 else not _widens(weight)


def _is_faster_by_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() * weight.shape[0] < _SMALL:
        return False
    return _by_onednn(*weight.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, as `torch.nn.functional.linear`, by the faster way."""
    if x.dtype != weight.dtype or not (_widens(weight) or _is_faster_by_onednn(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]
    return _product(x, weight, bias)


def transposed_product(left_TN: Tensor, right_TK: Tensor) -> Tensor:
    """left.T @ right, the gradient of a weight (N, K)."""
    if _widens(left_TN):
        return _product(left_TN.t(), right_TK.t())
    sides = left_TN.shape[1], right_TK.shape[1]
    if left_TN.dtype != torch.float32 or left_TN.device.type != "cpu" or not _by_onednn(*sides):
        return left_TN.t() @ right_TK
    # oneDNN copies its first operand into rows, so that is the narrower one.
    if left_TN.shape[1] <= right_TK.shape[1]:
        return _product(left_TN.t(), right_TK.t())
    return _product(right_TK.t(), left_TN.t()).t()


def copy_into(memory: Tensor, block: Tensor) -> Tensor:
    """A copy in flat memory, of its dtype."""
    return memory[: block.numel()].view_as(block).copy_(block)


class TorchProducts:
    """Torch's own."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As the protocol says."""
        return F.linear(x, weight, bias)

    def linear_into(self, memory: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As the protocol says: new memory takes longer to get than a product to fill."""
        shape = x.shape[0], weight.shape[0]
        out = memory[: shape[0] * shape[1]].view(shape)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def add_transposed(self, to_NK: Tensor, left_TN: Tensor, right_TK: Tensor) -> None:
        """As the protocol says."""
        to_NK.addmm_(left_TN.t(), right_TK)


class FastProducts(TorchProducts):
    """By the faster way for each shape on this processor."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As the protocol says."""
        return linear(x, weight, bias)

    def linear_into(self, memory: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As the protocol says; oneDNN cannot be told where to write."""
        if x.dtype == torch.float32 and x.device.type == "cpu" and _by_onednn(*weight.shape):
            return linear(x, weight, bias)
        if _widens(weight):
            out = memory[: x.shape[0] * weight.shape[0]].view(x.shape[0], weight.shape[0])
            return _widened_into(out, x, weight, bias)
        return super().linear_into(memory, x, weight, bias)

    def add_transposed(self, to_NK: Tensor, left_TN: Tensor, right_TK: Tensor) -> None:
        """As the protocol says."""
        if to_NK.device.type == "cpu" and _by_onednn(*to_NK.shape):
            to_NK += transposed_product(left_TN, right_TK)
        else:
            super().add_transposed(to_NK, left_TN, right_TK)


def _widened_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias of x (N, K) in `out` (N, M), each block in float32."""
    rows = max(_BLOCK // max(x.shape[1], 1), _BLOCK_ROWS)
    columns = max(_BLOCK // max(x.shape[1], min(rows, x.shape[0]), 1), _BLOCK_ROWS)
    for x_block, out_block in zip(x.split(rows), out.split(rows), strict=True):
        wide = x_block.float()
        for start in range(0, weight.shape[0], columns):
            part = slice(start, start + columns)
            own_bias = None if bias is None else bias[part].float()
            out_block[:, part] = F.linear(wide, weight[part].float(), own_bias)
    return out


# An operator of its own, so that selective recomputation sees one product and keeps its result.
@torch.library.custom_op("covey::widened_linear", mutates_args=())
def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(0, -2)
    out = x.new_empty(rows.shape[0], weight.shape[0])
    return _widened_into(out, rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _widens(weight):
        return _widened(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """`_product` has no derivative in torch; these are the two products of one, by the same library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_rows, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            _product(grad, weight.t()) if wants_x else None,
            transposed_product(grad_rows, rows) if wants_weight else None,
            grad_rows.sum(dim=0) if wants_bias else None,
        )


class FastLinear(nn.Linear):
    """A linear layer that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        return linear(input, self.weight, self.bias)


def use_fast_products(module: nn.Module) -> None:
    """Make every plain linear layer below `module` a `FastLinear`, in place, where there is oneDNN."""
    if not _HAS_ONEDNN:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = FastLinear
