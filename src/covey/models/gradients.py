"""Backward passes that add a weight's gradient to where it is kept, so that autograd has none to write, to
hold until the pass's end and to add.

Axes: V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

GradientOf = Callable[[Tensor], Tensor]
"""Where the gradient of a weight is kept, to be added to; zeros at first."""


def own_gradient(weight: Tensor) -> Tensor:
    """A leaf's `.grad`, to be added to."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_VD: Tensor, tokens: Tensor, padding: int | None, gradient_of: GradientOf
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        # What is saved may come back as another tensor, whose gradient nobody reads.
        ctx.weight_VD, ctx.padding, ctx.gradient_of = weight_VD, padding, gradient_of
        return F.embedding(tokens, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        tokens_T = ctx.saved_tensors[0].reshape(-1)
        to_VD = ctx.gradient_of(ctx.weight_VD)
        grad_TD = grad.reshape(tokens_T.shape[0], -1).to(to_VD.dtype)
        if ctx.padding is not None:
            grad_TD = grad_TD * (tokens_T != ctx.padding)[:, None]
        if to_VD.device.type == "cpu":
            to_VD.index_add_(0, tokens_T, grad_TD)
        else:
            # Adds in one order, which there index_add_ does not.
            to_VD.index_put_((tokens_T,), grad_TD, accumulate=True)
        return None, None, None, None


def _is_plain(module: Any) -> bool:
    """Whether a module is an embedding that is trained and does nothing but look up."""
    if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    return module.weight.requires_grad and module.weight.is_leaf


@contextmanager
def adding_embedding(model: Any, gradient_of: GradientOf | None) -> Iterator[None]:
    """Within it the input embedding of a model adds its gradient by itself, if it is a plain one that is
    trained; None leaves it as it is."""
    module: Any = None if gradient_of is None else model.get_input_embeddings()
    if gradient_of is None or not _is_plain(module):
        yield
        return

    def look_up(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return _Embedding.apply(module.weight, inputs[0], module.padding_idx, gradient_of)  # type: ignore[no-any-return]

    # Before those who listen too, who may put another output in the place of this one.
    handle = module.register_forward_hook(look_up, prepend=True)
    try:
        yield
    finally:
        handle.remove()
