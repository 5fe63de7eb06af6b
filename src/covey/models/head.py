"""The language-model head in blocks: log-probability and entropy of chosen tokens without a batch of logits.

Axes: N trained tokens, U contexts, C of them in a block, D hidden width, V vocabulary, B the part of it in a
block. A context is what a token is predicted from; what several tokens are predicted from, as the first ones
of siblings are, is projected once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.kernels.kept import KeptBlock, KeptDerivatives, KeptStats
from covey.kernels.products import copy_into
from covey.kernels.protocol import (
    Derivatives,
    HeadBlocks,
    HeadBuffers,
    HeadGradients,
    HeadSpec,
    HeadStats,
    HeadTokens,
    Kernels,
    Products,
)
from covey.text_files import banned_ids, placeholder_ids
from covey.types import KeptTokens, TokenStats


def head_spec(model: nn.Module) -> HeadSpec:
    """Read the scale and soft cap that a model family applies after its output embedding from its config, and
    the tokens that are never sampled: those that its generation_config.json bans, and placeholders."""
    whole: Any = model.config
    config = whole.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        scale /= float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    generation: Any = getattr(model, "generation_config", None)
    return HeadSpec(
        scale=scale,
        softcap=None if softcap is None else float(softcap),
        banned=banned_ids(
            getattr(generation, "suppress_tokens", None),
            getattr(config, "vocab_size", None),
            placeholder_ids(whole.to_dict()),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Head:
    """The output embedding, the kernels for it, and the blocks in which its logits exist."""

    weight_VD: Tensor
    bias_V: Tensor | None
    spec: HeadSpec
    blocks: HeadBlocks
    matmul: Products
    context_blocks: list[slice]
    vocab_blocks: list[slice]

    @classmethod
    def over(
        cls, num_contexts: int, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec, kernels: Kernels
    ) -> _Head:
        contexts, cells = spec.block_for(weight_VD)
        vocab = max(1, cells // max(1, min(contexts, num_contexts)))
        return cls(
            weight_VD,
            bias_V,
            spec,
            kernels.head(weight_VD, bias_V, spec),
            kernels.products,
            _slices(num_contexts, contexts),
            _slices(weight_VD.shape[0], vocab),
        )

    @property
    def is_one_block(self) -> bool:
        """Whether one block holds everything, so that the backward pass need not compute it again."""
        return len(self.context_blocks) == len(self.vocab_blocks) == 1

    def buffers(self, *, is_backward: bool) -> HeadBuffers:
        """Memory for the largest block."""
        sizes = ([s.stop - s.start for s in blocks] for blocks in (self.context_blocks, self.vocab_blocks))
        contexts, columns = (max(size, default=0) for size in sizes)
        return self.blocks.buffers(self.weight_VD, contexts, columns, is_backward=is_backward)

    def products(self, hidden_CD: Tensor, vocab: slice, buffers: HeadBuffers) -> Tensor:
        """hidden @ weight.T (+ bias) of a block (C, B), in the head's dtype, without banned tokens."""
        bias_B = None if self.bias_V is None else self.bias_V[vocab]
        products_CB = self.matmul.linear_into(buffers.products, hidden_CD, self.weight_VD[vocab], bias_B)
        self.spec.hide(products_CB, vocab)
        return products_CB

    def add_gradients(
        self,
        grad_hidden_CD: Tensor,
        grad_weight_BD: Tensor | None,
        derivative_CB: Tensor,
        hidden_CD: Tensor,
        vocab: slice,
        buffers: HeadBuffers,
    ) -> None:
        """Add a block's gradients to float32 sums."""
        weight_BD = self.weight_VD[vocab]
        if derivative_CB.dtype != torch.float32:
            self._add_product(grad_hidden_CD, derivative_CB, weight_BD.t(), buffers)
            if grad_weight_BD is not None:
                self._add_product(grad_weight_BD, derivative_CB.t(), hidden_CD.t(), buffers)
            return
        grad_hidden_CD += self.matmul.linear(derivative_CB, weight_BD.t())
        if grad_weight_BD is not None:
            self.matmul.add_transposed(grad_weight_BD, derivative_CB, hidden_CD)

    def _add_product(self, to_XD: Tensor, x_XK: Tensor, y_DK: Tensor, buffers: HeadBuffers) -> None:
        """Add x @ y.T, which are of lower precision than the sums."""
        self.blocks.add_to_sum(to_XD, self.matmul.linear_into(buffers.part, x_XK, y_DK), buffers)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class _ChunkedStats(torch.autograd.Function):
    """Computes log-probability per token and entropy per context, and the entropy within each token's kept
    set, which has no gradient.

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
        sets: KeptTokens | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens, buffers = HeadTokens(context_N, target_N, temperature_U), head.buffers(is_backward=False)
        logit_N = torch.zeros(target_N.shape, dtype=torch.float32, device=hidden_UD.device)
        stats_2U = logit_N.new_empty(2, hidden_UD.shape[0])
        kept: Tensor | None = None
        within = None if sets is None else KeptStats.zeros(target_N)
        for rows in head.context_blocks:
            softmax = head.blocks.softmax(tokens, rows, logit_N, buffers)
            block = None if sets is None else KeptBlock(sets, tokens, rows, head.spec)
            for vocab in head.vocab_blocks:
                products_CB = head.products(hidden_UD[rows], vocab, buffers)
                kept = products_CB.clone() if head.is_one_block else None
                if block is not None:
                    block.add(products_CB, vocab)
                softmax.add(products_CB, vocab)
            stats_2U[:, rows] = torch.stack(softmax.results())
            if block is not None and within is not None:
                block.write(within)
        entropy_U, normaliser_U = stats_2U.unbind()
        stats = logit_N, entropy_U, normaliser_U
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, context_N, target_N, temperature_U, *stats, kept)
        ctx.head, ctx.sets, ctx.within = head, sets, within
        ctx.set_materialize_grads(False)
        logprob_N = logit_N - normaliser_U[context_N]
        if sets is None or within is None:
            return logprob_N, entropy_U, None
        ctx.mark_non_differentiable(within.entropy_N)
        return torch.where(sets.count_N > 0, within.logprob_N, logprob_N), entropy_U, within.entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_U: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        head: _Head = ctx.head
        hidden_UD, weight_VD, bias_V, *saved, kept = ctx.saved_tensors
        tokens, stats = HeadTokens(*saved[:3]), HeadStats(*saved[3:])
        grad_hidden_UD = torch.zeros_like(hidden_UD, dtype=torch.float32)
        # Of a frozen head no gradient is made, which would be as large as the head.
        to_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[2] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        buffers = head.buffers(is_backward=True)
        gradients = HeadGradients(grad_logprob_N, grad_entropy_U)

        def full(gradients: HeadGradients) -> Derivatives:
            return head.blocks.derivatives(tokens, stats, gradients, buffers)

        if ctx.sets is None:
            derivatives = full(gradients)
        else:
            blocks = [KeptBlock(ctx.sets, tokens, rows, head.spec) for rows in head.context_blocks]
            derivatives = KeptDerivatives(ctx.sets, blocks, ctx.within, gradients, full)
        for vocab in head.vocab_blocks:
            sums_BD = None if to_VD is None else to_VD[vocab].float()
            for rows in head.context_blocks:
                if kept is not None:
                    products_CB = copy_into(buffers.products, kept)
                else:
                    products_CB = head.products(hidden_UD[rows], vocab, buffers)
                derivative_CB = derivatives.of(products_CB, rows, vocab)
                if grad_bias_V is not None:
                    grad_bias_V[vocab] += derivative_CB.sum(dim=0)
                if derivative_CB.dtype != weight_VD.dtype:
                    derivative_CB = copy_into(buffers.products, derivative_CB)
                head.add_gradients(
                    grad_hidden_UD[rows], sums_BD, derivative_CB, hidden_UD[rows], vocab, buffers
                )
            if to_VD is not None and sums_BD is not None and to_VD.dtype != torch.float32:
                to_VD[vocab] = sums_BD
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return None, grad_hidden_UD.to(hidden_UD.dtype), to_VD, grad_bias, None, None, None, None


def token_stats(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    context_N: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    spec: HeadSpec,
    kernels: Kernels,
    sets: KeptTokens | None = None,
) -> TokenStats:
    """Log-probability of `target_N` and entropy (nats), both float32 (N,), of softmax(logits / temperature).

    Token n is predicted from `hidden_UD[context_N[n]]`; tokens of one context have one temperature. A token
    with a kept set has the log-probability within it.
    """
    temperature_U = temperature_N.new_ones(hidden_UD.shape[0]).index_copy_(0, context_N, temperature_N)
    head = _Head.over(hidden_UD.shape[0], weight_VD, bias_V, spec, kernels)
    logprob_N, entropy_U, kept_entropy_N = _ChunkedStats.apply(
        head, hidden_UD, weight_VD, bias_V, context_N, target_N, temperature_U, sets
    )
    return TokenStats(logprob_N, entropy_U.index_select(0, context_N), kept_entropy_N)
