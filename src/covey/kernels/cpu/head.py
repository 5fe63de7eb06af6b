"""What is done in C with a block of the head: one pass over it where torch takes several.

Axes: N trained tokens, P distinct pairs of a context and a token, U contexts, C of them in a block, V
vocabulary, B the part of it in a block.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.kernels.cpu.library import INT, POINTER, address, structure
from covey.kernels.protocol import HeadBuffers, HeadGradients, HeadSpec, HeadStats, HeadTokens
from covey.kernels.torch_.head import block_buffers, results_of

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Block = structure(
    "_Block",
    **dict.fromkeys(("contexts", "columns", "first_context", "first_column", "cells", "threads"), INT),
    **dict.fromkeys(("products", "factor", "context_of", "token_of", "logit"), POINTER),
    **dict.fromkeys(("peak", "mass", "moment"), POINTER),
    **dict.fromkeys(("normaliser", "entropy", "by_logprob", "by_entropy", "by_cell"), POINTER),
)


def serves(weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> bool:
    """Whether the library computes the blocks of this head: on a CPU, without a soft cap and a bias."""
    is_plain = bias_V is None and spec.softcap is None
    return is_plain and weight_VD.dtype in _NAMES and weight_VD.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class CompiledHead:
    """As `HeadBlocks` says, for a head that the library `serves`."""

    library: ctypes.CDLL
    spec: HeadSpec

    def buffers(self, weight_VD: Tensor, contexts: int, columns: int, *, is_backward: bool) -> HeadBuffers:
        """As the protocol says."""
        return block_buffers(weight_VD, contexts, columns, is_backward=is_backward, needs_float32=False)

    def softmax(
        self, tokens: HeadTokens, rows: slice, logit_N: Tensor, buffers: HeadBuffers
    ) -> CompiledSoftmax:
        """As the protocol says."""
        return CompiledSoftmax(self.library, tokens, self.spec, rows, logit_N)

    def derivatives(
        self, tokens: HeadTokens, stats: HeadStats, gradients: HeadGradients, buffers: HeadBuffers
    ) -> CompiledDerivatives:
        """As the protocol says."""
        return CompiledDerivatives(self.library, tokens, self.spec, stats, gradients)

    def add_to_sum(self, sum_XD: Tensor, product_XD: Tensor, buffers: HeadBuffers) -> None:
        """As the protocol says, for contiguous tensors."""
        add_to_sum(self.library, sum_XD, product_XD)


class CompiledSoftmax:
    """As `TorchSoftmax`; products are left as they are."""

    def __init__(
        self, library: ctypes.CDLL, tokens: HeadTokens, spec: HeadSpec, rows: slice, logit_N: Tensor
    ) -> None:
        self._library, self._rows, self._logit_N = library, rows, logit_N
        self._factor_C = (spec.scale / tokens.temperature_U[rows]).contiguous()
        self._context_N, self._target_N = tokens.context_N.contiguous(), tokens.target_N.contiguous()
        self._sums_3C = logit_N.new_zeros(3, rows.stop - rows.start)
        self._sums_3C[0] = torch.finfo(torch.float32).min

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """As the protocol says."""
        block = _block(products_CB, self._rows, vocab, self._context_N, self._target_N)
        block.factor, block.logit = address(self._factor_C), address(self._logit_N)
        block.peak, block.mass, block.moment = map(address, self._sums_3C)
        _call(self._library, "block_add", products_CB.dtype, block)

    def results(self) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        return results_of(*self._sums_3C)


class CompiledDerivatives:
    """As `TorchDerivatives`, written over the products."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tokens: HeadTokens,
        spec: HeadSpec,
        stats: HeadStats,
        gradients: HeadGradients,
    ) -> None:
        self._library, self._stats = library, stats
        self._factor_U = spec.scale / tokens.temperature_U
        self._by_context_U = gradients.by_context(tokens)
        self._by_entropy_U = None if gradients.by_entropy_U is None else gradients.by_entropy_U.contiguous()
        # Siblings may begin with the same token: a cell of a block is written once.
        pair_N2 = torch.stack([tokens.context_N, tokens.target_N], dim=1)
        pair_P2, number_N = pair_N2.unique(dim=0, return_inverse=True)
        self._context_P, self._target_P = (column.contiguous() for column in pair_P2.unbind(1))
        empty_P = stats.logit_N.new_zeros(len(pair_P2))
        self._logit_P = empty_P.index_copy(0, number_N, stats.logit_N)
        self._by_cell_P = None
        if gradients.by_logprob_N is not None:
            self._by_cell_P = empty_P.index_add(0, number_N, gradients.by_logprob_N)

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        block = _block(products_CB, rows, vocab, self._context_P, self._target_P)
        block.logit, block.by_cell = address(self._logit_P), address(self._by_cell_P)
        block.factor = address(self._factor_U[rows])
        block.normaliser, block.entropy = (
            address(self._stats.normaliser_U[rows]),
            address(self._stats.entropy_U[rows]),
        )
        block.by_logprob = address(self._by_context_U[rows])
        if self._by_entropy_U is not None:
            block.by_entropy = address(self._by_entropy_U[rows])
        _call(self._library, "block_slope", products_CB.dtype, block)
        return products_CB


def _block(products_CB: Tensor, rows: slice, vocab: slice, context: Tensor, target: Tensor) -> Any:
    return _Block(
        contexts=products_CB.shape[0],
        columns=products_CB.shape[1],
        first_context=rows.start,
        first_column=vocab.start,
        cells=context.shape[0],
        threads=torch.get_num_threads(),
        products=address(products_CB),
        context_of=address(context),
        token_of=address(target),
    )


def _call(library: ctypes.CDLL, function: str, dtype: torch.dtype, block: Any) -> None:
    getattr(library, f"{function}_{_NAMES[dtype]}")(ctypes.byref(block))


def add_to_sum(library: ctypes.CDLL, sums: Tensor, part: Tensor) -> None:
    """sums += part, of the same size and contiguous; the sums are float32."""
    function = getattr(library, f"add_to_sum_{_NAMES[part.dtype]}")
    function(POINTER(address(sums)), POINTER(address(part)), INT(part.numel()), INT(torch.get_num_threads()))
