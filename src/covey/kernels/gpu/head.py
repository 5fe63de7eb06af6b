"""Blocks of the head by Triton: one kernel that reads a block, and one that reads and writes it, where torch
passes over it twenty times.

Axes: N trained tokens, U contexts, C of them in a block, V vocabulary, B the part of it in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.protocol import HeadBuffers, HeadGradients, HeadSpec, HeadStats, HeadTokens
from covey.kernels.torch_.head import results_of

# Logits that a program holds at a time.
_WIDTH = 4096


# Triton reads annotations, and knows none but its own.
@triton.jit  # type: ignore[misc]
def _add_block(products, factor, sums, contexts, columns, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take a block into `peak`, `mass` and `moment`, the three rows of `sums`; a program has one context."""
    row = tl.program_id(0)
    scale = tl.load(factor + row)
    peak, mass, moment = (
        tl.load(sums + row),
        tl.load(sums + contexts + row),
        tl.load(sums + 2 * contexts + row),
    )
    products += row.to(tl.int64) * columns
    for start in range(0, columns, width):
        column = start + tl.arange(0, width)
        is_inside = column < columns
        logit = tl.load(products + column, mask=is_inside, other=0.0).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(tl.where(is_inside, logit, peak)))
        fall = peak - higher
        behind = tl.where(is_inside, logit - higher, 0.0)
        weight = tl.where(is_inside, tl.exp(behind), 0.0)
        moment = tl.exp(fall) * (moment + mass * fall) + tl.sum(weight * behind)
        mass = tl.exp(fall) * mass + tl.sum(weight)
        peak = higher
    tl.store(sums + row, peak)
    tl.store(sums + contexts + row, mass)
    tl.store(sums + 2 * contexts + row, moment)


@triton.jit  # type: ignore[misc]
def _differentiate(  # type: ignore[no-untyped-def]
    products,
    factor,
    normaliser,
    by_context,
    entropy,
    by_entropy,
    columns,
    has_entropy: tl.constexpr,
    width: tl.constexpr,
):
    """Write exp(logprob) * (by_context - by_entropy * (logprob + entropy)) over the products."""
    row = tl.program_id(0)
    column = tl.program_id(1) * width + tl.arange(0, width)
    products += row.to(tl.int64) * columns + column
    product = tl.load(products, mask=column < columns, other=0.0).to(tl.float32)
    logprob = product * tl.load(factor + row) - tl.load(normaliser + row)
    slope = tl.load(by_context + row)
    if has_entropy:
        slope = slope - tl.load(by_entropy + row) * (logprob + tl.load(entropy + row))
    tl.store(products, tl.exp(logprob) * slope, mask=column < columns)


@dataclass(frozen=True, slots=True)
class FusedHead:
    """As `HeadBlocks` says, for a head without a bias and a soft cap."""

    spec: HeadSpec

    def buffers(self, weight_VD: Tensor, contexts: int, columns: int, *, is_backward: bool) -> HeadBuffers:
        """As the protocol says. Behind the products is one cell more, for tokens of other blocks."""
        products = weight_VD.new_empty(contexts * columns + 1)
        is_summed = is_backward and products.dtype != torch.float32
        part = products.new_empty(max(contexts, columns) * weight_VD.shape[1] if is_summed else 0)
        unused = products.new_empty(0, dtype=torch.float32)
        return HeadBuffers(products, unused, unused, part)

    def softmax(self, tokens: HeadTokens, rows: slice, logit_N: Tensor, buffers: HeadBuffers) -> FusedSoftmax:
        """As the protocol says."""
        return FusedSoftmax(tokens, self.spec, rows, logit_N)

    def derivatives(
        self, tokens: HeadTokens, stats: HeadStats, gradients: HeadGradients, buffers: HeadBuffers
    ) -> FusedDerivatives:
        """As the protocol says."""
        return FusedDerivatives(tokens, self.spec, stats, gradients, buffers.products)

    def add_to_sum(self, sum_XD: Tensor, product_XD: Tensor, buffers: HeadBuffers) -> None:
        """As the protocol says; on a GPU torch converts the product as it adds."""
        sum_XD += product_XD


class FusedSoftmax:
    """As `TorchSoftmax`; products are left as they are."""

    def __init__(self, tokens: HeadTokens, spec: HeadSpec, rows: slice, logit_N: Tensor) -> None:
        self._tokens, self._rows, self._logit_N = tokens, rows, logit_N
        factor_U = spec.scale / tokens.temperature_U
        self._factor_C, self._factor_N = factor_U[rows], factor_U[tokens.context_N]
        self._sums_3C = logit_N.new_zeros(3, rows.stop - rows.start)
        # The least number and not -inf, of which a difference with itself would be NaN.
        self._sums_3C[0] = torch.finfo(torch.float32).min

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """As the protocol says."""
        cell_N, is_outside_N = self._tokens.cells(self._rows, vocab)
        logit_N = products_CB.view(-1)[cell_N].float() * self._factor_N
        self._logit_N += logit_N.masked_fill_(is_outside_N, 0.0)
        contexts, columns = products_CB.shape
        with torch.cuda.device_of(products_CB):
            _add_block[(contexts,)](
                products_CB, self._factor_C, self._sums_3C, contexts, columns, width=_WIDTH, num_warps=8
            )

    def results(self) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        return results_of(*self._sums_3C)


class FusedDerivatives:
    """As `TorchDerivatives`, written over the products."""

    def __init__(
        self,
        tokens: HeadTokens,
        spec: HeadSpec,
        stats: HeadStats,
        gradients: HeadGradients,
        memory: Tensor,
    ) -> None:
        self._tokens, self._stats, self._memory = tokens, stats, memory
        self._factor_U = spec.scale / tokens.temperature_U
        self._by_context_U = -gradients.by_context(tokens) * self._factor_U
        by_entropy_U = gradients.by_entropy_U
        self._by_entropy_U = None if by_entropy_U is None else by_entropy_U * self._factor_U
        self._value_N = self._of_targets(gradients.by_logprob_N).to(memory.dtype)

    def _of_targets(self, by_logprob_N: Tensor | None) -> Tensor:
        """The derivative by the product of each token with its context, in float32."""
        context_N = self._tokens.context_N
        logprob_N = self._stats.logit_N - self._stats.normaliser_U[context_N]
        slope_N = self._by_context_U[context_N]
        if self._by_entropy_U is not None:
            surprise_N = logprob_N + self._stats.entropy_U[context_N]
            slope_N = slope_N - self._by_entropy_U[context_N] * surprise_N
        value_N = logprob_N.exp() * slope_N
        if by_logprob_N is None:
            return value_N
        return value_N + _sum_by_pair(self._tokens, by_logprob_N) * self._factor_U[context_N]

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        contexts, columns = products_CB.shape
        has_entropy = self._by_entropy_U is not None
        with torch.cuda.device_of(products_CB):
            _differentiate[(contexts, triton.cdiv(columns, _WIDTH))](
                products_CB,
                self._factor_U[rows],
                self._stats.normaliser_U[rows],
                self._by_context_U[rows],
                self._stats.entropy_U[rows],
                self._by_entropy_U[rows] if self._by_entropy_U is not None else self._factor_U,
                columns,
                has_entropy=has_entropy,
                width=_WIDTH,
                num_warps=8,
            )
        cell_N, is_outside_N = self._tokens.cells(rows, vocab)
        # A token of another block writes behind the products, where nothing is read.
        self._memory.scatter_(0, cell_N.masked_fill_(is_outside_N, len(self._memory) - 1), self._value_N)
        return products_CB


def _sum_by_pair(tokens: HeadTokens, by_logprob_N: Tensor) -> Tensor:
    """Of each token the sum over all tokens of its context and id: siblings may begin with the same token,
    and a cell of a block is written once. By sorting, since `unique` would wait for the GPU."""
    pair_N, order_N = ((tokens.context_N << 32) | tokens.target_N).sort()
    is_new_N = torch.ones_like(pair_N, dtype=torch.bool)
    is_new_N[1:] = pair_N[1:] != pair_N[:-1]
    number_N = is_new_N.cumsum(0) - 1
    sum_N = torch.zeros_like(by_logprob_N).index_add_(0, number_N, by_logprob_N[order_N])
    return torch.empty_like(by_logprob_N).index_copy_(0, order_N, sum_N[number_N])
