"""The language-model head in blocks: log-probability and entropy of chosen tokens without a batch of logits.

Axes: N trained tokens, U contexts, C of them in a block, D hidden width, V vocabulary, B the part of it in a
block. A context is what a token is predicted from; what several tokens are predicted from, as the first ones
of siblings are, is projected once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.models import head_blocks_native
from covey.models.head_blocks import (
    Found,
    HeadSpec,
    Room,
    Slopes,
    Softmax,
    Tokens,
    TorchSlopes,
    TorchSoftmax,
    Wanted,
)
from covey.models.head_blocks_native import CompiledSlopes, CompiledSoftmax, add_to_sum
from covey.models.linear import add_transposed_product, copy_in, linear, product_in


def head_spec(model: nn.Module) -> HeadSpec:
    """Read the scale and soft cap that a model family applies after its output embedding from its config."""
    config: Any = model.config
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        scale /= float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadSpec(scale=scale, softcap=None if softcap is None else float(softcap))


def logits_of(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    spec: HeadSpec,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear,
) -> Tensor:
    """Float32 logits (N, V) before any temperature."""
    return spec.bounded(product(hidden_ND, weight_VD, bias_V).float())


@dataclass(frozen=True, slots=True)
class _Head:
    """The output embedding, the blocks in which its logits exist, and the library where it computes them."""

    weight_VD: Tensor
    bias_V: Tensor | None
    spec: HeadSpec
    library: ctypes.CDLL | None
    context_blocks: list[slice]
    vocab_blocks: list[slice]

    @classmethod
    def over(
        cls,
        num_contexts: int,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        spec: HeadSpec,
        library: ctypes.CDLL | None,
    ) -> _Head:
        contexts, cells = spec.block_for(weight_VD)
        vocab = max(1, cells // max(1, min(contexts, num_contexts)))
        blocks = _slices(num_contexts, contexts), _slices(weight_VD.shape[0], vocab)
        if not head_blocks_native.serves(library, weight_VD, bias_V, spec):
            library = None
        return cls(weight_VD, bias_V, spec, library, *blocks)

    @property
    def is_one_block(self) -> bool:
        """Whether one block holds everything, so that the backward pass need not compute it again."""
        return len(self.context_blocks) == len(self.vocab_blocks) == 1

    @property
    def widest(self) -> tuple[int, int]:
        """Contexts and columns of the largest block."""
        sizes = ([s.stop - s.start for s in blocks] for blocks in (self.context_blocks, self.vocab_blocks))
        contexts, columns = (max(size, default=0) for size in sizes)
        return contexts, columns

    def room(self, *, is_backward: bool) -> Room:
        """Memory for the largest block."""
        contexts, columns = self.widest
        cells = contexts * columns
        products = self.weight_VD.new_empty(cells)
        is_low = products.dtype != torch.float32
        most = max(contexts, columns) * self.weight_VD.shape[1]
        part = products.new_empty(most if is_low and is_backward else 0)
        # What is computed in C needs no float32 beside it.
        needed = [cells if is_low else 0, part.numel() if is_backward else cells]
        logits, scratch = (
            products.new_empty(0 if self.library else size, dtype=torch.float32) for size in needed
        )
        return Room(products, logits if is_low else products, scratch, part)

    def products(self, hidden_CD: Tensor, vocab: slice, room: Room) -> Tensor:
        """hidden @ weight.T (+ bias) of a block (C, B), in the head's dtype."""
        bias_B = None if self.bias_V is None else self.bias_V[vocab]
        return product_in(room.products, hidden_CD, self.weight_VD[vocab], bias_B)

    def add_gradients(
        self,
        grad_hidden_CD: Tensor,
        grad_weight_BD: Tensor | None,
        slope_CB: Tensor,
        hidden_CD: Tensor,
        vocab: slice,
        room: Room,
    ) -> None:
        """Add a block's gradients to float32 sums."""
        weight_BD = self.weight_VD[vocab]
        if slope_CB.dtype != torch.float32:
            self._add_product(grad_hidden_CD, slope_CB, weight_BD.t(), room)
            if grad_weight_BD is not None:
                self._add_product(grad_weight_BD, slope_CB.t(), hidden_CD.t(), room)
            return
        grad_hidden_CD += linear(slope_CB, weight_BD.t())
        if grad_weight_BD is not None:
            add_transposed_product(grad_weight_BD, slope_CB, hidden_CD)

    def _add_product(self, to_XD: Tensor, x_XK: Tensor, y_DK: Tensor, room: Room) -> None:
        """Add x @ y.T, which are of lower precision than the sums: torch would convert it in fresh memory."""
        product_XD = product_in(room.part, x_XK, y_DK)
        if self.library is None:
            to_XD += copy_in(room.scratch, product_XD)
        else:
            add_to_sum(self.library, to_XD, product_XD)

    def softmax(self, tokens: Tokens, rows: slice, logit_N: Tensor, room: Room) -> Softmax:
        """Of the contexts of `rows`."""
        if self.library is None:
            return TorchSoftmax(tokens, self.spec, rows, logit_N, room)
        return CompiledSoftmax(self.library, tokens, self.spec, rows, logit_N)

    def slopes(self, tokens: Tokens, found: Found, wanted: Wanted, room: Room) -> Slopes:
        """Of all blocks."""
        if self.library is None:
            return TorchSlopes(tokens, self.spec, found, wanted, room)
        return CompiledSlopes(self.library, tokens, self.spec, found, wanted)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class _ChunkedStats(torch.autograd.Function):
    """Log-probability per token and entropy per context.

    The backward pass computes each block's products again, unless one block held them all. Its outer loop is
    over the vocabulary, so that each part of the weight's gradient is written once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        context_N: Tensor,
        target_N: Tensor,
        temperature_U: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tokens, room = Tokens(context_N, target_N, temperature_U), head.room(is_backward=False)
        logit_N = torch.zeros(target_N.shape, dtype=torch.float32, device=hidden_UD.device)
        stats_2U = logit_N.new_empty(2, hidden_UD.shape[0])
        kept: Tensor | None = None
        for rows in head.context_blocks:
            softmax = head.softmax(tokens, rows, logit_N, room)
            for vocab in head.vocab_blocks:
                products_CB = head.products(hidden_UD[rows], vocab, room)
                kept = products_CB.clone() if head.is_one_block else None
                softmax.add(products_CB, vocab)
            stats_2U[:, rows] = torch.stack(softmax.results())
        entropy_U, normaliser_U = stats_2U.unbind()
        found = logit_N, entropy_U, normaliser_U
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, context_N, target_N, temperature_U, *found, kept)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logit_N - normaliser_U[context_N], entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_U: Tensor | None) -> tuple[Any, ...]:
        head: _Head = ctx.head
        hidden_UD, weight_VD, bias_V, *asked_and_found, kept = ctx.saved_tensors
        tokens, found = Tokens(*asked_and_found[:3]), Found(*asked_and_found[3:])
        grad_hidden_UD = torch.zeros_like(hidden_UD, dtype=torch.float32)
        # Of a frozen head no gradient is made, which would be as large as the head.
        to_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[2] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        room = head.room(is_backward=True)
        slopes = head.slopes(tokens, found, Wanted(grad_logprob_N, grad_entropy_U), room)
        for vocab in head.vocab_blocks:
            sums_BD = None if to_VD is None else to_VD[vocab].float()
            for rows in head.context_blocks:
                if kept is not None:
                    products_CB = copy_in(room.products, kept)
                else:
                    products_CB = head.products(hidden_UD[rows], vocab, room)
                slope_CB = slopes.of(products_CB, rows, vocab)
                if grad_bias_V is not None:
                    grad_bias_V[vocab] += slope_CB.sum(dim=0)
                if slope_CB.dtype != weight_VD.dtype:
                    slope_CB = copy_in(room.products, slope_CB)
                head.add_gradients(grad_hidden_UD[rows], sums_BD, slope_CB, hidden_UD[rows], vocab, room)
            if to_VD is not None and sums_BD is not None and to_VD.dtype != torch.float32:
                to_VD[vocab] = sums_BD
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return None, grad_hidden_UD.to(hidden_UD.dtype), to_VD, grad_bias, None, None, None


def token_stats(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    context_N: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    spec: HeadSpec,
    library: ctypes.CDLL | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target_N` and entropy (nats), both float32 (N,), of softmax(logits / temperature).

    Token n is predicted from `hidden_UD[context_N[n]]`; tokens of one context have one temperature.
    Blocks are computed by the `library` where it serves the head.
    """
    temperature_U = temperature_N.new_ones(hidden_UD.shape[0]).index_copy_(0, context_N, temperature_N)
    head = _Head.over(hidden_UD.shape[0], weight_VD, bias_V, spec, library)
    logprob_N, entropy_U = _ChunkedStats.apply(
        head, hidden_UD, weight_VD, bias_V, context_N, target_N, temperature_U
    )
    return logprob_N, entropy_U.index_select(0, context_N)
