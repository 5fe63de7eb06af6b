"""The layers of `covey.models.llama_update` and the norm behind them in C: each pass is one call.

Axes: T tokens of a stream, P those of a prompt before it, E model width, L layers, X heads of keys and of
values, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.attention_native import Attention, Families
from covey.models.llama import Llama
from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.models.prefix import Prefix

# What a prefix keeps, in one piece.
_KEYS = "keys and values"

_Stack = structure(
    "_Stack",
    attention=Attention,
    **dict.fromkeys(("layers", "tokens", "width", "inner", "adds"), INT),
    epsilon=FLOAT,
    **dict.fromkeys(("cosines", "sines", "weights", "norm", "x", "kept", "gated", "scratch"), POINTER),
    **dict.fromkeys(("grad", "grad_x", "grads", "grad_norm"), POINTER),
    past=INT,
    **dict.fromkeys(("past_keys", "grad_past_keys", "keys", "grad_keys"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Stack:
    """A model's layers and a stream, as the library is told of them. `weights` are, in its order, those of
    every layer and of the norm behind them. Where it `adds`, a backward pass adds to their `.grad` by itself,
    and autograd hears of the embeddings' gradient alone. Where it `goes_on`, the stream is behind the
    tokens of a `prefix`; without, keys and values are kept for one."""

    library: ctypes.CDLL
    known: Llama
    weights: Sequence[Tensor | None]
    families: Families
    adds: bool
    prefix: Prefix | None
    goes_on: bool

    def hidden(self, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Last hidden states (T, E) of embeddings."""
        keeps = torch.is_grad_enabled()
        heard = () if self.adds else self.weights
        prefix = self.prefix
        past_LPXD = prefix.take(_KEYS) if prefix is not None and self.goes_on else None
        out_TE, keys_LTXD = _Layers.apply(self, keeps, past_LPXD, x_TE, cos_T1D, sin_T1D, *heard)
        if prefix is not None and not self.goes_on:
            prefix.keep(_KEYS, keys_LTXD)
        return out_TE  # type: ignore[no-any-return]

    @property
    def layers(self) -> int:
        """Their number."""
        return len(self.known.layers)

    @property
    def inner(self) -> int:
        """Width of a gated layer."""
        return self.known.layers[0].down.weight.shape[1]

    def arguments(self, x_TE: Tensor, turns: Sequence[Tensor]) -> Any:
        """What both passes are called with."""
        known, width = self.known, self.known.head_width
        heads, key_heads = (part.weight.shape[0] // width for part in known.layers[0].heads[:2])
        return _Stack(
            attention=self.families.arguments(
                heads=heads, key_heads=key_heads, head_width=width, scaling=known.scaling
            ),
            layers=self.layers,
            tokens=x_TE.shape[0],
            width=x_TE.shape[1],
            inner=self.inner,
            epsilon=known.epsilon,
            cosines=place(turns[0]),
            sines=place(turns[1]),
            adds=self.adds,
            weights=_places(self.weights),
            norm=place(self.weights[-1]),
        )

    def room_for_keys(self, like_TE: Tensor) -> Tensor | None:
        """Where keys and values of every layer go, (L, T, X, D), if anything goes on from them."""
        if self.prefix is None or self.goes_on:
            return None
        width = self.known.head_width
        heads = 2 * self.known.layers[0].heads[1].weight.shape[0] // width
        return like_TE.new_empty(self.layers, like_TE.shape[0], heads, width)

    def gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Where the gradients of the weights go; those that autograd asks for, where it hears of them."""
        weights = self.weights
        if not self.adds:
            pairs = zip(weights, needed, strict=True)
            return [torch.empty_like(w) if w is not None and is_needed else None for w, is_needed in pairs]
        for weight in weights:
            if weight is not None and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [None if weight is None else weight.grad for weight in weights]

    def call(self, name: str, found: Any, like: Tensor, *, is_backward: bool) -> None:
        """Call the library with memory for a layer at a time."""
        attention = found.attention
        held = like.new_empty(attention.threads * self.library.attention_scratch(ctypes.byref(attention)))
        scratch = like.new_empty(self.library.stack_scratch(ctypes.byref(found), is_backward))
        attention.held, found.scratch = place(held), place(scratch)
        getattr(self.library, name)(ctypes.byref(found))


def _go_on(found: Any, past_LPXD: Tensor | None) -> None:
    """Tell the library of the keys and values before the stream."""
    if past_LPXD is not None:
        found.past, found.past_keys = past_LPXD.shape[1], place(past_LPXD)


def _places(tensors: Sequence[Tensor | None]) -> Any:
    """Where they begin, as an array, which has to live as long as the call."""
    return ctypes.cast((POINTER * len(tensors))(*map(place, tensors)), POINTER)


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stack: Stack,
        keeps: bool,
        past_LPXD: Tensor | None,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        out_TE = x_TE.clone()
        found = stack.arguments(out_TE, (cos_T1D, sin_T1D))
        size, layers = stack.library.stack_kept(ctypes.byref(found)), stack.layers
        # Nothing is kept without a gradient: every layer has the same room.
        kept = [out_TE.new_empty(size) for _ in range(layers + 1 if keeps else 1)]
        gated = [out_TE.new_empty(3, out_TE.shape[0], stack.inner) for _ in range(layers if keeps else 1)]
        found.x, found.kept = place(out_TE), _places(kept if keeps else kept * (layers + 1))
        found.gated = _places(gated if keeps else gated * layers)
        _go_on(found, past_LPXD)
        keys_LTXD = stack.room_for_keys(out_TE)
        found.keys = place(keys_LTXD)
        stack.call("stack_forward", found, out_TE, is_backward=False)
        if keeps:
            ctx.save_for_backward(past_LPXD, cos_T1D, sin_T1D, *kept, *gated, *weights)
        ctx.stack = stack
        return out_TE, keys_LTXD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor, grad_LTXD: Tensor | None) -> tuple[Tensor | None, ...]:
        stack: Stack = ctx.stack
        past_LPXD, cos_T1D, sin_T1D, *rest = ctx.saved_tensors
        kept, gated = rest[: stack.layers + 1], rest[stack.layers + 1 : 2 * stack.layers + 1]
        grad_TE = grad_TE.contiguous()
        grad_x_TE = torch.empty_like(grad_TE)
        grads = stack.gradients(ctx.needs_input_grad[6:])
        found = stack.arguments(grad_TE, (cos_T1D, sin_T1D))
        found.kept, found.gated, found.grads = _places(kept), _places(gated), _places(grads)
        found.grad, found.grad_x, found.grad_norm = place(grad_TE), place(grad_x_TE), place(grads[-1])
        past = stack.prefix if stack.goes_on else None
        held_LPXD = None if past is None else past.held(_KEYS)
        _go_on(found, past_LPXD)
        found.grad_past_keys, found.grad_keys = place(held_LPXD), place(grad_LTXD)
        stack.call("stack_backward", found, grad_TE, is_backward=True)
        is_last = ctx.needs_input_grad[2]
        grad_past_LPXD = None if past is None else past.settle(_KEYS, is_last=is_last)
        return None, None, grad_past_LPXD, grad_x_TE, None, None, *(() if stack.adds else grads)


def serves(library: ctypes.CDLL, widths: Sequence[int]) -> bool:
    """Whether every width of a model's products and heads is one that the library computes."""
    return all(width % library.panel_width() == 0 for width in widths)
