"""Computes the softmax within kept sets, for tokens that sampling filters drew from a part of the vocabulary.

Axes: N trained tokens, U contexts, C of them in a block, B columns of a block; K ids of all kept sets of some
tokens, one set behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.kernels.protocol import Derivatives, HeadGradients, HeadSpec, HeadTokens
from covey.types import KeptTokens
from covey.types.kept import bitmap_words

_BITS = 32


def select(kept: KeptTokens, index_N: Tensor) -> KeptTokens:
    """Return the sets of the tokens of these numbers, in their order."""
    width_N, first_N = _places(kept)
    words_K = kept.words_K[_ranges(first_N[index_N], width_N[index_N])]
    return KeptTokens(vocab=kept.vocab, count_N=kept.count_N[index_N], words_K=words_K)


def joined(parts: Sequence[KeptTokens]) -> KeptTokens:
    """Return the sets of one or several parts one behind the other."""
    return KeptTokens(
        vocab=parts[0].vocab,
        count_N=torch.cat([part.count_N for part in parts]),
        words_K=torch.cat([part.words_K for part in parts]),
    )


def ids_of(kept: KeptTokens) -> Tensor:
    """Return the ids (K,) int64 of all sets, ascending within each."""
    width_N, first_N = _places(kept)
    is_list_N = kept.count_N <= width_N
    if bool(is_list_N.all()):
        return kept.words_K.long()
    id_K = torch.empty(int(kept.count_N.sum()), dtype=torch.int64, device=kept.words_K.device)
    start_N = kept.count_N.cumsum(0) - kept.count_N
    listed = is_list_N.nonzero()[:, 0]
    id_K[_ranges(start_N[listed], kept.count_N[listed])] = kept.words_K[
        _ranges(first_N[listed], width_N[listed])
    ].long()
    mapped = (~is_list_N).nonzero()[:, 0]
    words_MW = kept.words_K[_ranges(first_N[mapped], width_N[mapped])].view(len(mapped), -1)
    at = words_MW.nonzero()
    bits = (words_MW[at[:, 0], at[:, 1], None] >> torch.arange(_BITS, device=at.device)) & 1
    place = bits.nonzero()
    id_K[_ranges(start_N[mapped], kept.count_N[mapped])] = at[place[:, 0], 1] * _BITS + place[:, 1]
    return id_K


def _places(kept: KeptTokens) -> tuple[Tensor, Tensor]:
    """Return how many words each set has and the number of its first one, (N,) int64 each."""
    width_N = kept.count_N.clamp(max=bitmap_words(kept.vocab)).long()
    return width_N, width_N.cumsum(0) - width_N


def _ranges(first_N: Tensor, length_N: Tensor) -> Tensor:
    """Return the numbers first, first + 1, ... of each range, one range behind the other."""
    before_N = length_N.cumsum(0) - length_N
    return torch.arange(int(length_N.sum()), device=first_N.device) + (first_N - before_N).repeat_interleave(
        length_N
    )


@dataclass(frozen=True, slots=True)
class KeptStats:
    """Holds the forward pass's results within the sets, (N,) float32 each, in nats: log-probability, log of
    the sum of exp, and entropy. They are 0 for a token without a set."""

    logprob_N: Tensor
    normaliser_N: Tensor
    entropy_N: Tensor

    @classmethod
    def zeros(cls, like_N: Tensor) -> KeptStats:
        """Return room for the stats of these tokens."""
        return cls(*(like_N.new_zeros(len(like_N), dtype=torch.float32) for _ in range(3)))


class KeptBlock:
    """Gathers the logits of the sets of those tokens that the contexts `rows` predict, one block of the
    vocabulary after the other."""

    def __init__(self, kept: KeptTokens, tokens: HeadTokens, rows: slice, spec: HeadSpec) -> None:
        context_N = tokens.context_N
        is_inside_N = (context_N >= rows.start) & (context_N < rows.stop) & (kept.count_N > 0)
        self._number_n = is_inside_N.nonzero()[:, 0]
        own = select(kept, self._number_n)
        self._count_n = own.count_N.long()
        self._id_K = ids_of(own)
        # The tokens that entries are of, and the rows of the block that predict them.
        self._token_K = self._number_n.repeat_interleave(self._count_n)
        self._row_K = context_N[self._token_K] - rows.start
        self._is_target_K = self._id_K == tokens.target_N[self._token_K]
        self._temperature_K = tokens.temperature_U[rows][self._row_K]
        self._rows, self._spec = rows, spec
        sorted_K, self._order_K = self._id_K.sort(stable=True)
        self._sorted_K = sorted_K.contiguous()
        self._logit_K = self._temperature_K.new_zeros(len(self._id_K))

    @property
    def first_row(self) -> int:
        """Return the number of the block's first context."""
        return self._rows.start

    def _entries(self, vocab: slice) -> Tensor:
        """Return the numbers of the entries whose ids lie in a block of the vocabulary."""
        bounds = torch.tensor([vocab.start, vocab.stop], device=self._sorted_K.device)
        first, last = torch.searchsorted(self._sorted_K, bounds).tolist()
        return self._order_K[first:last]

    def _cells(self, number_k: Tensor, vocab: slice) -> Tensor:
        """Return where entries lie in a flat block."""
        return self._row_K[number_k] * (vocab.stop - vocab.start) + self._id_K[number_k] - vocab.start

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """Take the products of a block in, before anything is written over them."""
        number_k = self._entries(vocab)
        self._logit_K[number_k] = products_CB.reshape(-1)[self._cells(number_k, vocab)].float()

    def write(self, stats: KeptStats) -> None:
        """Write the stats of the tokens once every block of the vocabulary was added."""
        logit_K = self._spec.bounded(self._logit_K) / self._temperature_K
        if not len(logit_K):
            return
        peak_n = torch.segment_reduce(logit_K, "max", lengths=self._count_n, unsafe=True)
        below_K = logit_K - peak_n.repeat_interleave(self._count_n)
        # Sums of float32 over sets of tens of thousands would lose the small ones.
        weight_K = below_K.double().exp()
        mass_n = torch.segment_reduce(weight_K, "sum", lengths=self._count_n, unsafe=True)
        moment_n = torch.segment_reduce(weight_K * below_K, "sum", lengths=self._count_n, unsafe=True)
        log_mass_n = mass_n.log()
        number_n = self._number_n
        stats.normaliser_N[number_n] = (peak_n + log_mass_n).float()
        stats.entropy_N[number_n] = (log_mass_n - moment_n / mass_n).float()
        stats.logprob_N[self._token_K[self._is_target_K]] = logit_K[self._is_target_K]
        stats.logprob_N[number_n] -= stats.normaliser_N[number_n]

    def derivative(
        self, products_CB: Tensor, vocab: slice, stats: KeptStats, by_logprob_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cells of a flat block and the loss's derivative by their products, float32, for the tokens
        that have sets; products are read before anything is written over them."""
        number_k = self._entries(vocab)
        cell_k = self._cells(number_k, vocab)
        token_k, temperature_k = self._token_K[number_k], self._temperature_K[number_k]
        bounded_k = self._spec.bounded(products_CB.reshape(-1)[cell_k].float())
        share_k = (bounded_k / temperature_k - stats.normaliser_N[token_k]).exp()
        slope_k = (self._is_target_K[number_k].float() - share_k) * by_logprob_N[token_k]
        slope_k *= self._spec.scale / temperature_k
        if self._spec.softcap is not None:
            slope_k *= 1.0 - (bounded_k / self._spec.softcap) ** 2
        return cell_k, slope_k


class KeptDerivatives:
    """Computes `Derivatives` where tokens have sets: it adds theirs to what `full` computes for all others.

    `blocks` are of all blocks of contexts, and `gradients` the loss's by all tokens and contexts.
    """

    def __init__(
        self,
        kept: KeptTokens,
        blocks: Sequence[KeptBlock],
        stats: KeptStats,
        gradients: HeadGradients,
        full: Callable[[HeadGradients], Derivatives],
    ) -> None:
        self._stats, self._by_logprob_N = stats, gradients.by_logprob_N
        self._blocks = {block.first_row: block for block in blocks}
        has_set_N, others_N = kept.count_N > 0, None
        if self._by_logprob_N is not None and not bool(has_set_N.all()):
            others_N = self._by_logprob_N.masked_fill(has_set_N, 0.0)
        rest = HeadGradients(others_N, gradients.by_entropy_U)
        is_needed = others_N is not None or gradients.by_entropy_U is not None
        self._full = full(rest) if is_needed else None

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        own = None
        if self._by_logprob_N is not None:
            block = self._blocks[rows.start]
            own = block.derivative(products_CB, vocab, self._stats, self._by_logprob_N)
        derivative_CB = products_CB.zero_() if self._full is None else self._full.of(products_CB, rows, vocab)
        if own is not None:
            cell_k, slope_k = own
            derivative_CB.view(-1).index_add_(0, cell_k, slope_k.to(derivative_CB.dtype))
        return derivative_CB
