"""The layers of `covey.models.llama_update` and the norm behind them in C: each pass is one call.

Axes: T tokens of a stream, P those of a prompt before it, E model width, L layers, X heads of keys and of
values, D head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.attention_native import Attention, Families
from covey.models.gradients import own_gradient
from covey.models.llama import Llama
from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.models.prefix import Prefix

# What a prefix keeps, in one piece.
_KEYS = "keys and values"

StackCall = structure(
    "Stack",
    attention=Attention,
    **dict.fromkeys(("layers", "tokens", "width", "inner", "adds"), INT),
    epsilon=FLOAT,
    **dict.fromkeys(("position", "cosines", "sines", "weights", "norm", "x"), POINTER),
    **dict.fromkeys(("kept", "gated", "scratch"), POINTER),
    panels=POINTER,
    **dict.fromkeys(("has_all_panels", "is_laid"), INT),
    **dict.fromkeys(("grad", "grad_x", "token", "grad_embedding", "grads", "grad_norm"), POINTER),
    past=INT,
    **dict.fromkeys(("past_keys", "grad_past_keys", "keys", "grad_keys"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers as the library is told of them in every pass. `weights` are, in its order, those of
    every layer and of the norm behind them; `same` is what no pass changes."""

    library: ctypes.CDLL
    known: Llama
    weights: Sequence[Tensor | None]
    same: Any

    @classmethod
    def of(cls, library: ctypes.CDLL, known: Llama, weights: Sequence[Tensor | None]) -> Layers:
        """For weights that stay where they are as long as this is used."""
        width = known.head_width
        heads, key_heads = (part.weight.shape[0] // width for part in known.layers[0].heads[:2])
        same = StackCall(
            attention=Attention(heads=heads, key_heads=key_heads, head_width=width, scaling=known.scaling),
            layers=len(known.layers),
            width=known.embedding.shape[1],
            inner=known.layers[0].down.weight.shape[1],
            epsilon=known.epsilon,
            weights=_places(weights),
            norm=place(weights[-1]),
        )
        return cls(library, known, weights, same)

    @property
    def keep_gradients(self) -> bool:
        """Whether every weight's gradient is kept with it, the embeddings' among them."""
        weights = (self.known.embedding, *self.weights)
        return all(w is None or (w.requires_grad and w.is_leaf) for w in weights)


class Laid:
    """What passes have in common between which no weight changes: the weights as forward passes multiply by
    them, laid by the first, and where gradients are to be added."""

    def __init__(self) -> None:
        self._panels: tuple[Layers, Tensor] | None = None
        self._grads: list[Tensor | None] = []
        self._grad_places: Any = None

    def panels(self, layers: Layers, size: int, like: Tensor) -> tuple[Tensor, bool]:
        """Room for all layers' panels of so many numbers each, and whether they are in it already."""
        if self._panels is not None and self._panels[0] is layers:
            return self._panels[1], True
        self._panels = layers, like.new_empty(layers.same.layers * size)
        return self._panels[1], False

    def own_gradients(self, weights: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Any]:
        """Each weight's `.grad`, to be added to, and their places."""
        now = [None if weight is None else weight.grad for weight in weights]
        # A hook may put another tensor in the place of one.
        if not self._grads or not all(map(is_, now, self._grads)):
            self._grads = [None if weight is None else own_gradient(weight) for weight in weights]
            self._grad_places = _places(self._grads)
        return self._grads, self._grad_places


@dataclass(frozen=True, slots=True)
class Stack:
    """One pass through a model's layers. Where it `adds`, its backward pass adds to the weights' `.grad` by
    itself, and autograd hears of none. Where it `goes_on`, the stream is behind the tokens of a `prefix`;
    without, keys and values are kept for one. `laid` is other passes', too."""

    layers: Layers
    families: Families
    adds: bool
    prefix: Prefix | None
    goes_on: bool
    laid: Laid | None

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Last hidden states (T, E) of a stream whose positions turn by what these tables say of them."""
        prefix, layers = self.prefix, self.layers
        heard = () if self.adds else layers.weights
        past_LPXD = prefix.take(_KEYS) if prefix is not None and self.goes_on else None
        stream = tokens_T, positions_T, *turns
        given = self, torch.is_grad_enabled(), past_LPXD, stream, layers.known.embedding
        out_TE, keys_LTXD = _Layers.apply(*given, *heard)
        if prefix is not None and not self.goes_on:
            prefix.keep(_KEYS, keys_LTXD)
        return out_TE  # type: ignore[no-any-return]

    def arguments(self, stream: Sequence[Tensor], past_LPXD: Tensor | None) -> Any:
        """What both passes are called with, of tokens, their positions, and tables of cosines and sines."""
        found = StackCall.from_buffer_copy(self.layers.same)
        self.families.put(found.attention)
        found.tokens, found.adds = stream[0].shape[0], self.adds
        found.token, found.position, found.cosines, found.sines = map(place, stream)
        if past_LPXD is not None:
            found.past, found.past_keys = past_LPXD.shape[1], place(past_LPXD)
        return found

    def room_for_keys(self, like_TE: Tensor) -> Tensor | None:
        """Where keys and values of every layer go, (L, T, X, D), if anything goes on from them."""
        if self.prefix is None or self.goes_on:
            return None
        same = self.layers.same
        return like_TE.new_empty(
            same.layers, like_TE.shape[0], 2 * same.attention.key_heads, same.attention.head_width
        )

    def lay(self, found: Any, like: Tensor) -> Tensor:
        """Room for the weights as the forward pass multiplies by them: of all layers, or of one at a time."""
        size = self.layers.library.stack_panels(ctypes.byref(found))
        if self.laid is None:
            return like.new_empty(size)
        found.has_all_panels = True
        panels, found.is_laid = self.laid.panels(self.layers, size, like)
        return panels

    def gradients(self, needed: Sequence[bool]) -> tuple[list[Tensor | None], Any]:
        """Where the gradients of the weights go, and their places; of those that autograd asks for, where it
        hears of them."""
        weights = self.layers.weights
        if self.adds:
            return (self.laid or Laid()).own_gradients(weights)
        pairs = zip(weights, needed, strict=True)
        grads = [torch.empty_like(w) if w is not None and is_needed else None for w, is_needed in pairs]
        return grads, _places(grads)

    def call(self, name: str, found: Any, like: Tensor, *, is_backward: bool) -> None:
        """Call the library with memory for a layer at a time."""
        library = self.layers.library
        scratch = like.new_empty(library.stack_scratch(ctypes.byref(found), is_backward))
        found.scratch = place(scratch)
        getattr(library, name)(ctypes.byref(found))


def _places(tensors: Sequence[Tensor | None]) -> Any:
    """Where they begin, as an array, which has to live as long as the call."""
    places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return ctypes.cast((POINTER * len(places))(*places), POINTER)


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stack: Stack,
        keeps: bool,
        past_LPXD: Tensor | None,
        stream: Sequence[Tensor],
        embedding_VE: Tensor,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        out_TE = embedding_VE.index_select(0, stream[0])
        tokens = out_TE.shape[0]
        found = stack.arguments(stream, past_LPXD)
        size, layers = stack.layers.library.stack_kept(ctypes.byref(found)), found.layers
        # Nothing is kept without a gradient: every layer has the same room.
        kept = [out_TE.new_empty(size) for _ in range(layers + 1 if keeps else 1)]
        gated = [out_TE.new_empty(3, tokens, found.inner) for _ in range(layers if keeps else 1)]
        found.x, found.kept = place(out_TE), _places(kept if keeps else kept * (layers + 1))
        found.gated = _places(gated if keeps else gated * layers)
        keys_LTXD = stack.room_for_keys(out_TE)
        found.keys = place(keys_LTXD)
        panels = stack.lay(found, out_TE)
        found.panels = place(panels)
        stack.call("stack_forward", found, out_TE, is_backward=False)
        if keeps:
            ctx.save_for_backward(past_LPXD, *kept, *gated, *weights)
        ctx.stack, ctx.stream = stack, stream
        return out_TE, keys_LTXD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor, grad_LTXD: Tensor | None) -> tuple[Tensor | None, ...]:
        stack: Stack = ctx.stack
        past_LPXD, *rest = ctx.saved_tensors
        grad_TE = grad_TE.contiguous()
        grad_x_TE = torch.empty_like(grad_TE)
        grads, grad_places = stack.gradients(ctx.needs_input_grad[5:])
        found = stack.arguments(ctx.stream, past_LPXD)
        kept, gated = rest[: found.layers + 1], rest[found.layers + 1 : 2 * found.layers + 1]
        found.kept, found.gated, found.grads = _places(kept), _places(gated), grad_places
        found.grad, found.grad_x, found.grad_norm = place(grad_TE), place(grad_x_TE), place(grads[-1])
        past = stack.prefix if stack.goes_on else None
        held_LPXD = None if past is None else past.held(_KEYS)
        found.grad_past_keys, found.grad_keys = place(held_LPXD), place(grad_LTXD)
        grad_embedding_VE = None
        if ctx.needs_input_grad[4]:
            embedding_VE = stack.layers.known.embedding
            grad_embedding_VE = own_gradient(embedding_VE) if stack.adds else torch.zeros_like(embedding_VE)
        found.grad_embedding = place(grad_embedding_VE)
        stack.call("stack_backward", found, grad_TE, is_backward=True)
        is_last = ctx.needs_input_grad[2]
        grad_past_LPXD = None if past is None else past.settle(_KEYS, is_last=is_last)
        heard = (None,) if stack.adds else (grad_embedding_VE, *grads)
        return None, None, grad_past_LPXD, None, *heard


def serves(library: ctypes.CDLL, widths: Sequence[int]) -> bool:
    """Whether every width of a model's products and heads is one that the library computes."""
    return all(width % library.panel_width() == 0 for width in widths)
