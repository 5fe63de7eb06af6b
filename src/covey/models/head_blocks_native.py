"""What is done in C with a block of the head: one pass over it where torch takes several.

Axes: N trained tokens, P distinct pairs of a context and a token, U contexts, C of them in a block, V
vocabulary, B the part of it in a block.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from covey.models.head_blocks import Found, HeadSpec, Tokens, Wanted, results_of
from covey.models.native.library import INT, POINTER, place, structure

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Block = structure(
    "_Block",
    **dict.fromkeys(("contexts", "columns", "first_context", "first_column", "cells", "threads"), INT),
    **dict.fromkeys(("products", "factor", "context_of", "token_of", "logit"), POINTER),
    **dict.fromkeys(("peak", "mass", "moment"), POINTER),
    **dict.fromkeys(("normaliser", "entropy", "by_logprob", "by_entropy", "by_cell"), POINTER),
)


def serves(library: ctypes.CDLL | None, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> bool:
    """Whether the library computes the blocks of this head: on a CPU, without a soft cap and a bias."""
    is_plain = bias_V is None and spec.softcap is None
    return library is not None and is_plain and weight_VD.dtype in _NAMES and weight_VD.device.type == "cpu"


class CompiledSoftmax:
    """As `TorchSoftmax`; products are as they were afterwards."""

    def __init__(
        self, library: ctypes.CDLL, tokens: Tokens, spec: HeadSpec, rows: slice, logit_N: Tensor
    ) -> None:
        self._library, self._rows, self._logit_N = library, rows, logit_N
        self._factor_C = (spec.scale / tokens.temperature_U[rows]).contiguous()
        self._context_N, self._target_N = tokens.context_N.contiguous(), tokens.target_N.contiguous()
        self._sums_3C = logit_N.new_zeros(3, rows.stop - rows.start)
        self._sums_3C[0] = torch.finfo(torch.float32).min

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """As the protocol says."""
        block = _block(products_CB, self._rows, vocab, self._context_N, self._target_N)
        block.factor, block.logit = place(self._factor_C), place(self._logit_N)
        block.peak, block.mass, block.moment = map(place, self._sums_3C)
        _call(self._library, "block_add", products_CB.dtype, block)

    def results(self) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        return results_of(*self._sums_3C)


class CompiledSlopes:
    """As `TorchSlopes`, written over the products."""

    def __init__(
        self, library: ctypes.CDLL, tokens: Tokens, spec: HeadSpec, found: Found, wanted: Wanted
    ) -> None:
        self._library, self._found = library, found
        self._factor_U = spec.scale / tokens.temperature_U
        self._by_context_U = wanted.by_context(tokens)
        self._by_entropy_U = None if wanted.by_entropy_U is None else wanted.by_entropy_U.contiguous()
        # Siblings may begin with the same token: a cell of a block is written once.
        pair_N2 = torch.stack([tokens.context_N, tokens.target_N], dim=1)
        pair_P2, number_N = pair_N2.unique(dim=0, return_inverse=True)
        self._context_P, self._target_P = (column.contiguous() for column in pair_P2.unbind(1))
        empty_P = found.logit_N.new_zeros(len(pair_P2))
        self._logit_P = empty_P.index_copy(0, number_N, found.logit_N)
        self._by_cell_P = None
        if wanted.by_logprob_N is not None:
            self._by_cell_P = empty_P.index_add(0, number_N, wanted.by_logprob_N)

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        block = _block(products_CB, rows, vocab, self._context_P, self._target_P)
        block.logit, block.by_cell = place(self._logit_P), place(self._by_cell_P)
        block.factor = place(self._factor_U[rows])
        block.normaliser, block.entropy = (
            place(self._found.normaliser_U[rows]),
            place(self._found.entropy_U[rows]),
        )
        block.by_logprob = place(self._by_context_U[rows])
        if self._by_entropy_U is not None:
            block.by_entropy = place(self._by_entropy_U[rows])
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
        products=place(products_CB),
        context_of=place(context),
        token_of=place(target),
    )


def _call(library: ctypes.CDLL, function: str, dtype: torch.dtype, block: Any) -> None:
    getattr(library, f"{function}_{_NAMES[dtype]}")(ctypes.byref(block))


def add_to_sum(library: ctypes.CDLL, sums: Tensor, part: Tensor) -> None:
    """sums += part, of the same size and contiguous; the sums are float32."""
    function = getattr(library, f"add_to_sum_{_NAMES[part.dtype]}")
    function(POINTER(place(sums)), POINTER(place(part)), INT(part.numel()), INT(torch.get_num_threads()))
