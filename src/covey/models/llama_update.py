"""The update's forward and backward pass through a model of the Llama family in few kernel calls.

Around the attention of a layer stand two functions with a backward pass of their own: norm, projections and
turns before it, projection, residual, norm and gated layer behind it. They keep what the backward pass needs
and nothing else, and their products are of whole layers' weights side by side.

Axes: T tokens of a stream, X all heads, D head width, E model width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.models import llama_update_native as native
from covey.models.attention import StreamLayout
from covey.models.attention_native import Families
from covey.models.linear import linear, transposed_product
from covey.models.llama import Llama, LlamaLayer, Turns, llama, weights_of

# Weights of all layers up to which calls take a share of the time that is worth saving.
_LARGEST = 1 << 23


def update_weights(model: nn.Module) -> Llama | None:
    """The weights of a model that has a short pass: a small one that `covey.models.llama` recognises, in
    float32 on a CPU, without dropout; None for any other."""
    known = llama(model, adapted=True)
    if known is None or known.embedding.device.type != "cpu" or known.size > _LARGEST:
        return None
    if any(weight.dtype != torch.float32 for weight in weights_of(known)):
        return None
    return known if not has_dropout(model) and all(_is_known(layer) for layer in known.layers) else None


def has_dropout(model: nn.Module) -> bool:
    """Whether a model that `covey.models.llama` recognises drops attention weights."""
    backbone: Any = model.base_model
    return any(layer.self_attn.attention_dropout for layer in backbone.layers)


def _is_known(layer: LlamaLayer) -> bool:
    without_bias = (layer.out, *layer.gated, layer.down)
    biases = [part.bias is not None for part in layer.heads]
    return (
        layer.query_norm is None
        and all(part.bias is None for part in without_bias)
        and all(biases) == any(biases)
    )


@dataclass(frozen=True, slots=True)
class ShortPass:
    """What computes the last hidden states of a small model; `library` where it computes products of such
    widths, and what it is told in every pass where that is `fixed`."""

    known: Llama
    turns: Turns
    library: ctypes.CDLL | None
    fixed: native.Layers | None

    @property
    def keep_gradients(self) -> bool:
        """Whether every weight is one whose gradient a compiled backward pass may add to by itself."""
        return self.fixed is not None and self.fixed.keep_gradients

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: StreamLayout,
        *,
        adds: bool = False,
        laid: native.Laid | None = None,
    ) -> Tensor:
        """Last hidden states (T, E) of a stream, with gradients of every weight. Where it `adds` and is
        compiled, a backward pass adds to `.grad` by itself, as `Policy.adding_gradients` says of weights that
        `keep_gradients`, and `laid` is what passes before it have made of the same weights."""
        known = self.known
        if self.library is not None and layout.is_plain:
            layers = self.fixed or native.Layers.of(self.library, known, _every_weight(known))
            stack = native.Stack(
                layers,
                Families.of(layout.segments),
                adds,
                layout.prefix,
                layout.first > 0,
                laid if self.fixed else None,
            )
            return stack.hidden(tokens_T, positions_T, self.turns.tables(positions_T))
        turns = self.turns.at(positions_T)
        x_TE = F.embedding(tokens_T, known.embedding, known.padding)
        for number, layer in enumerate(known.layers):
            weights = _tensors(layer)
            heads_TXD = _BeforeAttention.apply(x_TE, *turns, known.epsilon, *weights[:7])
            queries = layer.heads[0].weight.shape[0] // known.head_width
            attended_THD = layout.attend_heads(number, heads_TXD, queries, known.scaling)
            x_TE = _BehindAttention.apply(x_TE, attended_THD.flatten(1), known.epsilon, *weights[7:])
        return _Norm.apply(x_TE, known.norm, known.epsilon)  # type: ignore[no-any-return]


def short_pass(model: nn.Module, library: ctypes.CDLL | None) -> ShortPass | None:
    """The short pass of a model that has one."""
    known = update_weights(model)
    if known is None:
        return None
    if library is None or not _is_compiled(known, library):
        return ShortPass(known, Turns(known), None, None)
    # What an adapter adds to is another weight in each pass.
    fixed = None if known.is_adapted else native.Layers.of(library, known, _every_weight(known))
    return ShortPass(known, Turns(known), library, fixed)


def _every_weight(known: Llama) -> tuple[Tensor | None, ...]:
    """The weights of every layer and of the norm behind them, in the order of the library."""
    return *(weight for layer in known.layers for weight in _tensors(layer)), known.norm


def _is_compiled(known: Llama, library: ctypes.CDLL) -> bool:
    """Whether the library computes them: widths that it knows, the same in every layer."""
    shapes = [tuple(None if w is None else w.shape for w in _tensors(layer)) for layer in known.layers]
    if any(shape != shapes[0] for shape in shapes):
        return False
    widths = {width for shape in shapes[0] if shape is not None and len(shape) > 1 for width in shape}
    if not native.serves(library, (known.head_width, *widths)):
        return False
    return all(weight.is_contiguous() for weight in weights_of(known))


def _tensors(layer: LlamaLayer) -> tuple[Tensor | None, ...]:
    """A layer's weights in the order of the two functions, of which the first takes seven, and of the
    library."""
    query, key, value = layer.heads
    before = layer.before_attention, query.whole, key.whole, value.whole, query.bias, key.bias, value.bias
    return *before, layer.before_mlp, layer.out.whole, *(part.whole for part in layer.gated), layer.down.whole


def _unit(x_TE: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMSNorm without its weight, and what it multiplied by, (T, 1)."""
    length_T1 = torch.linalg.vector_norm(x_TE, dim=-1, keepdim=True)
    scale_T1 = length_T1.square_().div_(x_TE.shape[-1]).add_(epsilon).rsqrt_()
    return x_TE * scale_T1, scale_T1


def _unit_backward(
    grad_TE: Tensor, unit_TE: Tensor, scale_T1: Tensor, weight_E: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of RMSNorm by its input and by its weight."""
    product_TE = grad_TE * unit_TE
    along_T1 = (product_TE @ weight_E).div_(weight_E.shape[0])[:, None]
    grad_x_TE = (grad_TE * weight_E).addcmul_(unit_TE, along_T1, value=-1).mul_(scale_T1)
    return grad_x_TE, product_TE.sum(dim=0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        unit_TE, scale_T1 = _unit(x_TE, epsilon)
        ctx.save_for_backward(unit_TE, scale_T1, weight_E)
        return unit_TE * weight_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        return *_unit_backward(grad_TE, *ctx.saved_tensors), None


class _BeforeAttention(torch.autograd.Function):
    """Queries, keys and values (T, X, D) of a layer's input; queries and keys are turned."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        epsilon: float,
        norm_E: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *biases: Tensor | None,
    ) -> Tensor:
        unit_TE, scale_T1 = _unit(x_TE, epsilon)
        given = [b for b in biases if b is not None]
        heads_TX = linear(
            unit_TE * norm_E, torch.cat([query, key, value]), torch.cat(given) if given else None
        )
        width = cos_T1D.shape[-1]
        heads_TXD = heads_TX.view(heads_TX.shape[0], -1, width)
        turned_TXD = heads_TXD[:, : (query.shape[0] + key.shape[0]) // width]
        rolled_TXD = turned_TXD.roll(width // 2, -1).mul_(sin_T1D)
        turned_TXD.mul_(cos_T1D).add_(rolled_TXD)
        ctx.save_for_backward(unit_TE, scale_T1, norm_E, query, key, value, cos_T1D, sin_T1D)
        ctx.has_biases = bool(given)
        return heads_TXD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TXD: Tensor) -> tuple[Tensor | None, ...]:
        unit_TE, scale_T1, norm_E, query, key, value, cos_T1D, sin_T1D = ctx.saved_tensors
        sizes = [query.shape[0], key.shape[0], value.shape[0]]
        turned_TXD = grad_TXD[:, : (sizes[0] + sizes[1]) // cos_T1D.shape[-1]]
        rolled_TXD = (turned_TXD * sin_T1D).roll(cos_T1D.shape[-1] // 2, -1)
        heads_TXD = grad_TXD.clone(memory_format=torch.contiguous_format)
        heads_TXD[:, : turned_TXD.shape[1]].mul_(cos_T1D).add_(rolled_TXD)
        grad_TX = heads_TXD.flatten(1)
        weights = transposed_product(grad_TX, unit_TE * norm_E).split(sizes)
        biases = grad_TX.sum(dim=0).split(sizes) if ctx.has_biases else (None,) * 3
        grad_TE = linear(grad_TX, torch.cat([query, key, value]).t())
        grad_x_TE, grad_norm_E = _unit_backward(grad_TE, unit_TE, scale_T1, norm_E)
        return grad_x_TE, None, None, None, grad_norm_E, *weights, *biases


class _BehindAttention(torch.autograd.Function):
    """A layer's output (T, E) from its input and from what its heads attended to, (T, H x D)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        attended_TX: Tensor,
        epsilon: float,
        norm_E: Tensor,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        middle_TE = linear(attended_TX, out).add_(x_TE)
        unit_TE, scale_T1 = _unit(middle_TE, epsilon)
        both_TF = linear(unit_TE * norm_E, torch.cat([gate, up]))
        gate_TF, up_TF = both_TF.chunk(2, dim=1)
        inner_TF = F.silu(gate_TF).mul_(up_TF)
        ctx.save_for_backward(attended_TX, unit_TE, scale_T1, both_TF, inner_TF, norm_E, out, gate, up, down)
        return linear(inner_TF, down).add_(middle_TE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        attended_TX, unit_TE, scale_T1, both_TF, inner_TF, norm_E, out, gate, up, down = ctx.saved_tensors
        gate_TF, up_TF = both_TF.chunk(2, dim=1)
        grad_inner_TF = linear(grad_TE, down.t())
        grad_down = transposed_product(grad_TE, inner_TF)
        grad_both_TF = torch.empty_like(both_TF)
        grad_gate_TF, grad_up_TF = grad_both_TF.chunk(2, dim=1)
        torch.mul(grad_inner_TF, F.silu(gate_TF), out=grad_up_TF)
        grad_gate_TF.copy_(torch.ops.aten.silu_backward(grad_inner_TF.mul_(up_TF), gate_TF))
        grad_gate, grad_up = transposed_product(grad_both_TF, unit_TE * norm_E).chunk(2)
        grad_normed_TE = linear(grad_both_TF, torch.cat([gate, up]).t())
        grad_middle_TE, grad_norm_E = _unit_backward(grad_normed_TE, unit_TE, scale_T1, norm_E)
        grad_middle_TE += grad_TE
        grad_attended_TX = linear(grad_middle_TE, out.t())
        grad_out = transposed_product(grad_middle_TE, attended_TX)
        return (
            grad_middle_TE,
            grad_attended_TX,
            None,
            grad_norm_E,
            grad_out,
            grad_gate,
            grad_up,
            grad_down,
        )
