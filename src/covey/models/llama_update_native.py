"""The two functions of `covey.models.llama_update` in C: each pass of each is one call.

Axes: T tokens of a stream, X all heads, D head width, E model width, F width of the gated layer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.native.library import FLOAT, INT, POINTER, place, structure

_Sizes = structure("_Sizes", tokens=INT, width=INT, threads=INT, epsilon=FLOAT)
_Norm = structure("_Norm", **dict.fromkeys(("weight", "unit", "scale", "normed"), POINTER))
_Before = structure(
    "_Before",
    sizes=_Sizes,
    norm=_Norm,
    **dict.fromkeys(("heads", "turned", "head_width"), INT),
    **dict.fromkeys(("cosines", "sines", "x", "query", "key", "value", "bias"), POINTER),
    **dict.fromkeys(("queries", "keys"), INT),
    **dict.fromkeys(("panels", "out", "grad", "turned_back", "grad_normed", "grad_x"), POINTER),
    **dict.fromkeys(("grad_weight", "grad_bias", "grad_norm"), POINTER),
)
_Behind = structure(
    "_Behind",
    sizes=_Sizes,
    norm=_Norm,
    **dict.fromkeys(("attended_width", "inner_width"), INT),
    **dict.fromkeys(("x", "attended", "out", "gate", "up", "down"), POINTER),
    **dict.fromkeys(("panels", "gates", "ups", "inner", "y", "grad", "grad_inner"), POINTER),
    **dict.fromkeys(("grad_gates", "grad_ups", "grad_normed", "grad_x", "grad_attended"), POINTER),
    **dict.fromkeys(("grad_out", "grad_gate", "grad_up", "grad_down", "grad_norm"), POINTER),
)


def serves(library: ctypes.CDLL, widths: tuple[int, ...]) -> bool:
    """Whether every width of a layer's products is one that the library computes."""
    return all(width % library.panel_width() == 0 for width in widths)


def _sizes(x_TE: Tensor, epsilon: float) -> Any:
    return _Sizes(tokens=x_TE.shape[0], width=x_TE.shape[1], threads=torch.get_num_threads(), epsilon=epsilon)


def _norm(weight_E: Tensor, unit_TE: Tensor, scale_T: Tensor, normed_TE: Tensor) -> Any:
    return _Norm(*(place(tensor) for tensor in (weight_E, unit_TE, scale_T, normed_TE)))


class BeforeAttention(torch.autograd.Function):
    """Queries, keys and values (T, X, D) of a layer's input; queries and keys are turned."""

    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        epsilon: float,
        *weights: Tensor,
    ) -> Tensor:
        norm_E, query, key, value, *biases = weights
        given = [b for b in biases if b is not None]
        bias_X = torch.cat(given) if given else None
        unit_TE, normed_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
        tokens, width = x_TE.shape
        scale_T, heads = x_TE.new_empty(tokens), query.shape[0] + 2 * key.shape[0]
        heads_TX = x_TE.new_empty(tokens, heads)
        panels = x_TE.new_empty(heads, width)
        args = _Before(
            sizes=_sizes(x_TE, epsilon),
            norm=_norm(norm_E, unit_TE, scale_T, normed_TE),
            **_heads_of(query, key, value, cos_T1D, sin_T1D),
            x=place(x_TE),
            bias=place(bias_X),
            panels=place(panels),
            out=place(heads_TX),
        )
        library.before_attention(ctypes.byref(args))
        ctx.save_for_backward(unit_TE, scale_T, norm_E, query, key, value, cos_T1D, sin_T1D)
        ctx.library, ctx.has_biases = library, bool(given)
        return heads_TX.view(tokens, -1, cos_T1D.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TXD: Tensor) -> tuple[Tensor | None, ...]:
        unit_TE, scale_T, norm_E, query, key, value, cos_T1D, sin_T1D = ctx.saved_tensors
        grad_TXD = grad_TXD.contiguous()
        sizes = [query.shape[0], key.shape[0], value.shape[0]]
        normed_TE, grad_normed_TE, grad_x_TE = (torch.empty_like(unit_TE) for _ in range(3))
        grad_norm_E, turned_TXD = torch.empty_like(norm_E), torch.empty_like(grad_TXD)
        grad_weight = query.new_empty(sum(sizes), unit_TE.shape[1])
        grad_bias = query.new_empty(sum(sizes)) if ctx.has_biases else None
        args = _Before(
            sizes=_sizes(unit_TE, 0.0),
            norm=_norm(norm_E, unit_TE, scale_T, normed_TE),
            **_heads_of(query, key, value, cos_T1D, sin_T1D),
            grad=place(grad_TXD),
            turned_back=place(turned_TXD),
            grad_normed=place(grad_normed_TE),
            grad_x=place(grad_x_TE),
            grad_weight=place(grad_weight),
            grad_bias=place(grad_bias),
            grad_norm=place(grad_norm_E),
        )
        ctx.library.before_attention_backward(ctypes.byref(args))
        biases = (None,) * 3 if grad_bias is None else grad_bias.split(sizes)
        return None, grad_x_TE, None, None, None, grad_norm_E, *grad_weight.split(sizes), *biases


def _heads_of(
    query: Tensor, key: Tensor, value: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
) -> dict[str, int | None]:
    return {
        "heads": query.shape[0] + 2 * key.shape[0],
        "turned": query.shape[0] + key.shape[0],
        "head_width": cos_T1D.shape[-1],
        "queries": query.shape[0],
        "keys": key.shape[0],
        "query": place(query),
        "key": place(key),
        "value": place(value),
        "cosines": place(cos_T1D),
        "sines": place(sin_T1D),
    }


class BehindAttention(torch.autograd.Function):
    """A layer's output (T, E) from its input and from what its heads attended to, (T, H x D)."""

    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x_TE: Tensor,
        attended_TX: Tensor,
        epsilon: float,
        norm_E: Tensor,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        attended_TX = attended_TX.contiguous()
        unit_TE, normed_TE, y_TE = (torch.empty_like(x_TE) for _ in range(3))
        scale_T = x_TE.new_empty(x_TE.shape[0])
        gates_TF, ups_TF, inner_TF = x_TE.new_empty(3, x_TE.shape[0], gate.shape[0]).unbind()
        panels = x_TE.new_empty(sum(weight.numel() for weight in (out, gate, up, down)))
        args = _Behind(
            sizes=_sizes(x_TE, epsilon),
            norm=_norm(norm_E, unit_TE, scale_T, normed_TE),
            **_layer_of(attended_TX, (out, gate, up, down), (gates_TF, ups_TF, inner_TF)),
            x=place(x_TE),
            panels=place(panels),
            y=place(y_TE),
        )
        library.behind_attention(ctypes.byref(args))
        ctx.save_for_backward(
            *(attended_TX, unit_TE, scale_T, gates_TF, ups_TF, inner_TF), *(norm_E, out, gate, up, down)
        )
        ctx.library = library
        return y_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        attended_TX, unit_TE, scale_T, gates_TF, ups_TF, inner_TF, *weights = ctx.saved_tensors
        norm_E, out, gate, up, down = weights
        grad_TE = grad_TE.contiguous()
        normed_TE, grad_normed_TE, grad_x_TE = (torch.empty_like(unit_TE) for _ in range(3))
        grad_inner_TF, grad_gates_TF, grad_ups_TF = (torch.empty_like(gates_TF) for _ in range(3))
        grad_attended_TX = torch.empty_like(attended_TX)
        grads = [torch.empty_like(weight) for weight in weights]
        names = ("grad_norm", "grad_out", "grad_gate", "grad_up", "grad_down")
        args = _Behind(
            sizes=_sizes(unit_TE, 0.0),
            norm=_norm(norm_E, unit_TE, scale_T, normed_TE),
            **_layer_of(attended_TX, (out, gate, up, down), (gates_TF, ups_TF, inner_TF)),
            grad=place(grad_TE),
            grad_inner=place(grad_inner_TF),
            grad_gates=place(grad_gates_TF),
            grad_ups=place(grad_ups_TF),
            grad_normed=place(grad_normed_TE),
            grad_x=place(grad_x_TE),
            grad_attended=place(grad_attended_TX),
            **{name: place(grad) for name, grad in zip(names, grads, strict=True)},
        )
        ctx.library.behind_attention_backward(ctypes.byref(args))
        return None, grad_x_TE, grad_attended_TX, None, *grads


def _layer_of(
    attended_TX: Tensor, products: tuple[Tensor, ...], kept: tuple[Tensor, ...]
) -> dict[str, int | None]:
    out, gate, *_ = products
    names = ("attended", "out", "gate", "up", "down", "gates", "ups", "inner")
    tensors = (attended_TX, *products, *kept)
    places = {name: place(tensor) for name, tensor in zip(names, tensors, strict=True)}
    return {"attended_width": out.shape[1], "inner_width": gate.shape[0], **places}
