"""The head of a small model in C: each pass is one call.

Axes: T tokens of a stream, U contexts, N chosen tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.models.gradients import own_gradient
from covey.models.head_blocks import HeadSpec
from covey.models.native.library import INT, POINTER, place, structure

Head = structure(
    "Head",
    **dict.fromkeys(("tokens", "contexts", "chosen", "width", "vocab", "threads"), INT),
    **dict.fromkeys(("hidden", "weight", "token_of", "context_of", "target", "temperature"), POINTER),
    **dict.fromkeys(("kept", "logprobs", "entropies", "divisors"), POINTER),
    **dict.fromkeys(("panels", "logprob", "entropy", "grad_logprob", "grad_entropy"), POINTER),
    **dict.fromkeys(("scratch", "slopes", "factors", "grad_hidden", "grad_weight"), POINTER),
    adds=INT,
)


class Stats(torch.autograd.Function):
    """Log-probability and entropy (N,) of targets, each from the context that `context_N` says. Where it
    `adds`, a backward pass adds to the weight's `.grad` by itself, and autograd hears of none.

    Contexts are the tokens `context_U` of a stream. Everything is float32, as `serves` asks for. Raises
    IndexError for a target or a context that does not exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        adds: bool,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        context_U: Tensor,
        context_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        given = (hidden_TD, weight_VD, context_U, context_N, target_N, temperature_N)
        inputs = [tensor.contiguous() for tensor in given]
        kept, found = _call(inputs)
        panels = torch.empty_like(weight_VD)
        logprob_N, entropy_N = (hidden_TD.new_empty(target_N.shape[0]) for _ in range(2))
        found.kept, found.panels = place(kept), place(panels)
        found.logprob, found.entropy = place(logprob_N), place(entropy_N)
        if library.head_forward(ctypes.byref(found)):
            raise IndexError("a target or a context of this micro-batch does not exist")
        ctx.save_for_backward(*inputs, kept)
        # What is saved may come back as another tensor, whose `.grad` nobody reads.
        ctx.library, ctx.added_to = library, weight_VD if adds else None
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, kept = ctx.saved_tensors
        hidden_TD, weight_VD = inputs[:2]
        scratch, found = _call(inputs)
        grad_hidden_TD = torch.empty_like(hidden_TD)
        # Of a frozen head no gradient is made.
        grad_weight_VD = None
        if ctx.needs_input_grad[3]:
            to_VD = ctx.added_to
            grad_weight_VD = torch.empty_like(weight_VD) if to_VD is None else own_gradient(to_VD)
        grads = [None if g is None else g.contiguous() for g in (grad_logprob_N, grad_entropy_N)]
        found.kept, found.scratch = place(kept), place(scratch)
        found.grad_logprob, found.grad_entropy = map(place, grads)
        found.grad_hidden, found.grad_weight = place(grad_hidden_TD), place(grad_weight_VD)
        found.adds = ctx.added_to is not None
        ctx.library.head_backward(ctypes.byref(found))
        heard_VD = grad_weight_VD if ctx.added_to is None else None
        return None, None, grad_hidden_TD, heard_VD, None, None, None, None


def _call(inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """What both passes are called with, and memory: of the one for what it keeps, of the other as scratch."""
    hidden_TD, weight_VD, context_U, _, target_N, _ = inputs
    (vocab, width), contexts = weight_VD.shape, context_U.shape[0]
    sizes = hidden_TD.shape[0], contexts, target_N.shape[0], width, vocab, torch.get_num_threads()
    return hidden_TD.new_empty(contexts * (width + vocab + 2)), Head(*sizes, *map(place, inputs))


def serves(
    library: ctypes.CDLL, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec, contexts: int
) -> bool:
    """Whether the library computes this head of so many contexts: its logits are held all at once, and
    nothing but a temperature is applied to them."""
    block, cells = spec.block_for(weight_VD)
    is_plain = bias_V is None and spec.scale == 1.0 and spec.softcap is None
    is_float32 = weight_VD.dtype == torch.float32 and weight_VD.is_contiguous()
    is_small = contexts <= block and contexts * weight_VD.shape[0] <= cells
    return (
        is_plain and is_float32 and is_small and all(n % library.panel_width() == 0 for n in weight_VD.shape)
    )
