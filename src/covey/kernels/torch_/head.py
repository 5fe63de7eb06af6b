"""Blocks of the head in torch: products of some contexts' hidden states and a part of the vocabulary.

Axes: N trained tokens, U contexts, C of them in a block, V vocabulary, B the part of it in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.kernels.products import copy_into
from covey.kernels.protocol import HeadBuffers, HeadGradients, HeadSpec, HeadStats, HeadTokens


@dataclass(frozen=True, slots=True)
class TorchHead:
    """As `HeadBlocks` says, for any head."""

    spec: HeadSpec

    def buffers(self, weight_VD: Tensor, contexts: int, columns: int, *, is_backward: bool) -> HeadBuffers:
        """As the protocol says."""
        return block_buffers(weight_VD, contexts, columns, is_backward=is_backward)

    def softmax(self, tokens: HeadTokens, rows: slice, logit_N: Tensor, buffers: HeadBuffers) -> TorchSoftmax:
        """As the protocol says."""
        return TorchSoftmax(tokens, self.spec, rows, logit_N, buffers)

    def derivatives(
        self, tokens: HeadTokens, stats: HeadStats, gradients: HeadGradients, buffers: HeadBuffers
    ) -> TorchDerivatives:
        """As the protocol says."""
        return TorchDerivatives(tokens, self.spec, stats, gradients, buffers)

    def add_to_sum(self, sum_XD: Tensor, product_XD: Tensor, buffers: HeadBuffers) -> None:
        """As the protocol says; torch would convert the product in new memory."""
        sum_XD += copy_into(buffers.scratch, product_XD)


def block_buffers(
    weight_VD: Tensor, contexts: int, columns: int, *, is_backward: bool, needs_float32: bool = True
) -> HeadBuffers:
    """Memory for blocks of at most so many contexts and columns; without `needs_float32` their logits are
    nowhere held in float32 beside the products."""
    cells = contexts * columns
    products = weight_VD.new_empty(cells)
    is_low = products.dtype != torch.float32
    part = products.new_empty(max(contexts, columns) * weight_VD.shape[1] if is_low and is_backward else 0)
    sizes = [cells if is_low else 0, part.numel() if is_backward else cells]
    logits, scratch = (
        products.new_empty(size if needs_float32 else 0, dtype=torch.float32) for size in sizes
    )
    return HeadBuffers(products, logits if is_low else products, scratch, part)


def _divide(logits_CB: Tensor, temperature_C: Tensor) -> Tensor:
    """Divide in place by the temperatures; nothing is done where they are 1 and asking costs nothing."""
    if temperature_C.device.type == "cpu" and bool((temperature_C == 1.0).all()):
        return logits_CB
    return logits_CB.div_(temperature_C[:, None])


def _float32(products_CB: Tensor, buffers: HeadBuffers) -> Tensor:
    return products_CB if products_CB.dtype == torch.float32 else copy_into(buffers.logits, products_CB)


class TorchSoftmax:
    """`peak` is the largest logit, `mass` the sum of exp(logit - peak), `moment` that sum weighted with
    (logit - peak); each (C, 1)."""

    def __init__(
        self, tokens: HeadTokens, spec: HeadSpec, rows: slice, logit_N: Tensor, buffers: HeadBuffers
    ) -> None:
        self._tokens, self._spec, self._rows, self._logit_N, self._buffers = (
            tokens,
            spec,
            rows,
            logit_N,
            buffers,
        )
        zero = logit_N.new_zeros(rows.stop - rows.start, 1)
        # The least number and not -inf, of which a difference with itself would be NaN.
        self._peak = torch.full_like(zero, torch.finfo(zero.dtype).min)
        self._mass = self._moment = zero

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """As the protocol says."""
        logits_CB = self._spec.bounded(_float32(products_CB, self._buffers))
        if self._spec.softcap is not None:
            # The cap has brought them back.
            self._spec.hide(logits_CB, vocab)
        logits_CB = _divide(logits_CB, self._tokens.temperature_U[self._rows])
        cell_N, is_outside_N = self._tokens.cells(self._rows, vocab)
        self._logit_N += logits_CB.view(-1)[cell_N].masked_fill_(is_outside_N, 0.0)
        peak = torch.maximum(self._peak, logits_CB.amax(dim=1, keepdim=True))
        fall = self._peak - peak
        logits_CB -= peak
        weight_CB = torch.exp(logits_CB, out=self._buffers.scratch[: logits_CB.numel()].view_as(logits_CB))
        mass = weight_CB.sum(dim=1, keepdim=True)
        moment = weight_CB.mul_(logits_CB).sum(dim=1, keepdim=True)
        self._moment = fall.exp() * (self._moment + self._mass * fall) + moment
        self._mass = fall.exp() * self._mass + mass
        self._peak = peak

    def results(self) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        return results_of(self._peak[:, 0], self._mass[:, 0], self._moment[:, 0])


def results_of(peak_C: Tensor, mass_C: Tensor, moment_C: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and log of the sum of exp."""
    log_mass_C = mass_C.log()
    return log_mass_C - moment_C / mass_C, peak_C + log_mass_C


class TorchDerivatives:
    """In float32, for any head."""

    def __init__(
        self,
        tokens: HeadTokens,
        spec: HeadSpec,
        stats: HeadStats,
        gradients: HeadGradients,
        buffers: HeadBuffers,
    ) -> None:
        self._tokens, self._spec, self._stats, self._gradients, self._buffers = (
            tokens,
            spec,
            stats,
            gradients,
            buffers,
        )
        self._by_context_U = gradients.by_context(tokens)

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        spec, damping_CB = self._spec, None
        logits_CB = spec.bounded(_float32(products_CB, self._buffers))
        if spec.softcap is not None:
            spec.hide(logits_CB, vocab)
            damping_CB = 1.0 - (logits_CB / spec.softcap) ** 2
        temperature_C = self._tokens.temperature_U[rows]
        logprobs_CB = _divide(logits_CB, temperature_C).sub_(self._stats.normaliser_U[rows, None])
        factor = self._by_context_U[rows, None].neg()
        by_logprob_N, by_entropy_U = self._gradients.by_logprob_N, self._gradients.by_entropy_U
        if by_entropy_U is not None:
            entropy_C1 = self._stats.entropy_U[rows, None]
            factor = (logprobs_CB + entropy_C1).mul_(-by_entropy_U[rows, None]).add_(factor)
        derivative_CB = logprobs_CB.exp_().mul_(factor)
        if by_logprob_N is not None:
            cell_N, is_outside_N = self._tokens.cells(rows, vocab)
            derivative_CB.view(-1).scatter_add_(0, cell_N, by_logprob_N.masked_fill(is_outside_N, 0.0))
        derivative_CB = _divide(derivative_CB, temperature_C)
        if damping_CB is not None:
            derivative_CB *= damping_CB
        if spec.scale != 1.0:
            derivative_CB *= spec.scale
        return derivative_CB
