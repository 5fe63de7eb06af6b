"""What is done in torch with a block of the head: with products of some contexts' hidden states and a part of
the vocabulary.

Axes: N trained tokens, U contexts, C of them in a block, V vocabulary, B the part of it in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from covey.models.linear import copy_in

# Contexts of a block at least, and its logits: 2 Mi values are 8 MiB in float32, which stay in a CPU's cache;
# on a GPU products have to be larger to fill it.
_BLOCK = {"cpu": (2048, 1 << 21), "gpu": (4096, 1 << 26)}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How hidden states become logits: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`.

    `block` is how many contexts and logits are held at once; None is what suits the device.
    """

    scale: float = 1.0
    softcap: float | None = None
    block: tuple[int, int] | None = None

    def block_for(self, weight_VD: Tensor) -> tuple[int, int]:
        """Contexts and logits that are held at once: contexts are more where the vocabulary is small."""
        contexts, cells = self.block or _BLOCK["cpu" if weight_VD.device.type == "cpu" else "gpu"]
        return max(contexts, cells // weight_VD.shape[0]), cells

    def bounded(self, logits_NV: Tensor) -> Tensor:
        """Logits of products, which are float32."""
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


@dataclass(frozen=True, slots=True)
class Room:
    """Flat memory for a block, used for one after another: on a CPU fresh memory for each would take longer
    to get than to fill. `products` and `part`, of the weight's gradient, are of the head's dtype, `logits`
    and `scratch` float32. What nobody needs is empty; where products are float32, they are the logits."""

    products: Tensor
    logits: Tensor
    scratch: Tensor
    part: Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is asked of the head: token n is `target_N[n]`, predicted from context `context_N[n]`."""

    context_N: Tensor
    target_N: Tensor
    temperature_U: Tensor

    def cells(self, rows: slice, vocab: slice) -> tuple[Tensor, Tensor]:
        """Where each target lies in a flat block (0 where it is in another), and whether it is in another."""
        row_N, column_N = self.context_N - rows.start, self.target_N - vocab.start
        height, width = rows.stop - rows.start, vocab.stop - vocab.start
        is_inside_N = (row_N >= 0) & (row_N < height) & (column_N >= 0) & (column_N < width)
        return (row_N * width + column_N) * is_inside_N, ~is_inside_N


@dataclass(frozen=True, slots=True)
class Found:
    """What the forward pass finds: of each token its logit, over its temperature, and of each context the
    entropy and the log of the sum of exp. All float32."""

    logit_N: Tensor
    entropy_U: Tensor
    normaliser_U: Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """The loss's derivatives by the log-probability of each token and by the entropy of each context; None
    is 0."""

    by_logprob_N: Tensor | None
    by_entropy_U: Tensor | None

    def by_context(self, tokens: Tokens) -> Tensor:
        """The sum of the first over the tokens of each context (U,)."""
        sum_U = torch.zeros_like(tokens.temperature_U)
        if self.by_logprob_N is None:
            return sum_U
        return sum_U.index_add_(0, tokens.context_N, self.by_logprob_N)


class Softmax(Protocol):
    """Softmax statistics of the contexts of `rows` over the blocks of the vocabulary that are added."""

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """Take a block in, whose products may be gone afterwards, and write the logits of its tokens."""

    def results(self) -> tuple[Tensor, Tensor]:
        """Entropy, and log of the sum of exp, each (C,)."""


class Slopes(Protocol):
    """The loss's derivative by the products hidden @ weight.T."""

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """That of a block (C, B), whose products may be gone afterwards: in their dtype or in float32."""


def _divide(logits_CB: Tensor, temperature_C: Tensor) -> Tensor:
    """Divide in place by the temperatures; nothing is done where they are 1 and asking costs nothing."""
    if temperature_C.device.type == "cpu" and bool((temperature_C == 1.0).all()):
        return logits_CB
    return logits_CB.div_(temperature_C[:, None])


def _float32(products_CB: Tensor, room: Room) -> Tensor:
    return products_CB if products_CB.dtype == torch.float32 else copy_in(room.logits, products_CB)


class TorchSoftmax:
    """`peak` is the largest logit, `mass` the sum of exp(logit - peak), `moment` that sum weighted with
    (logit - peak); each (C, 1)."""

    def __init__(self, tokens: Tokens, spec: HeadSpec, rows: slice, logit_N: Tensor, room: Room) -> None:
        self._tokens, self._spec, self._rows, self._logit_N, self._room = tokens, spec, rows, logit_N, room
        zero = logit_N.new_zeros(rows.stop - rows.start, 1)
        # The least number and not -inf, of which a difference with itself would be NaN.
        self._peak = torch.full_like(zero, torch.finfo(zero.dtype).min)
        self._mass = self._moment = zero

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """As the protocol says."""
        logits_CB = self._spec.bounded(_float32(products_CB, self._room))
        logits_CB = _divide(logits_CB, self._tokens.temperature_U[self._rows])
        cell_N, is_outside_N = self._tokens.cells(self._rows, vocab)
        self._logit_N += logits_CB.view(-1)[cell_N].masked_fill_(is_outside_N, 0.0)
        peak = torch.maximum(self._peak, logits_CB.amax(dim=1, keepdim=True))
        fall = self._peak - peak
        logits_CB -= peak
        weight_CB = torch.exp(logits_CB, out=self._room.scratch[: logits_CB.numel()].view_as(logits_CB))
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


class TorchSlopes:
    """In float32, for any head."""

    def __init__(self, tokens: Tokens, spec: HeadSpec, found: Found, wanted: Wanted, room: Room) -> None:
        self._tokens, self._spec, self._found, self._wanted, self._room = tokens, spec, found, wanted, room
        self._by_context_U = wanted.by_context(tokens)

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """As the protocol says."""
        spec, damping_CB = self._spec, None
        logits_CB = spec.bounded(_float32(products_CB, self._room))
        if spec.softcap is not None:
            damping_CB = 1.0 - (logits_CB / spec.softcap) ** 2
        temperature_C = self._tokens.temperature_U[rows]
        logprobs_CB = _divide(logits_CB, temperature_C).sub_(self._found.normaliser_U[rows, None])
        factor = self._by_context_U[rows, None].neg()
        by_logprob_N, by_entropy_U = self._wanted.by_logprob_N, self._wanted.by_entropy_U
        if by_entropy_U is not None:
            entropy_C1 = self._found.entropy_U[rows, None]
            factor = (logprobs_CB + entropy_C1).mul_(-by_entropy_U[rows, None]).add_(factor)
        slope_CB = logprobs_CB.exp_().mul_(factor)
        if by_logprob_N is not None:
            cell_N, is_outside_N = self._tokens.cells(rows, vocab)
            slope_CB.view(-1).scatter_add_(0, cell_N, by_logprob_N.masked_fill(is_outside_N, 0.0))
        slope_CB = _divide(slope_CB, temperature_C)
        if damping_CB is not None:
            slope_CB *= damping_CB
        if spec.scale != 1.0:
            slope_CB *= spec.scale
        return slope_CB
