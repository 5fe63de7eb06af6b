"""The language-model head in blocks: log-probability and entropy of chosen tokens without a batch of logits.

Axes: N trained tokens, U contexts, C of them in a block, D hidden width, V vocabulary, B the part of it in a
block. A context is what a token is predicted from; what several tokens are predicted from, as the first ones
of siblings are, is projected once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.models.gradients import GradientOf
from covey.models.linear import add_transposed_product, copy_in, linear, product_in

# Contexts of a block at least, and its logits: 2 Mi values are 8 MiB in float32, which stay in a CPU's cache;
# on a GPU products have to be larger to fill it.
_BLOCK = {"cpu": (1024, 1 << 21), "gpu": (4096, 1 << 26)}


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
    return _bounded(product(hidden_ND, weight_VD, bias_V).float(), spec)


def _bounded(logits_NV: Tensor, spec: HeadSpec) -> Tensor:
    """Logits of products, which are float32."""
    if spec.scale != 1.0:
        logits_NV = logits_NV * spec.scale
    if spec.softcap is not None:
        logits_NV = spec.softcap * torch.tanh(logits_NV / spec.softcap)
    return logits_NV


@dataclass(frozen=True, slots=True)
class _Head:
    """The output embedding, and the blocks in which its logits exist."""

    weight_VD: Tensor
    bias_V: Tensor | None
    spec: HeadSpec
    context_blocks: list[slice]
    vocab_blocks: list[slice]

    @classmethod
    def over(cls, num_contexts: int, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> _Head:
        contexts, cells = spec.block_for(weight_VD)
        vocab = max(1, cells // max(1, min(contexts, num_contexts)))
        blocks = _slices(num_contexts, contexts), _slices(weight_VD.shape[0], vocab)
        return cls(weight_VD, bias_V, spec, *blocks)

    @property
    def keeps_logprobs(self) -> bool:
        """Whether one block holds everything, so that the backward pass need not compute it again."""
        return len(self.context_blocks) == len(self.vocab_blocks) == 1 and self.spec.softcap is None

    @property
    def cells(self) -> int:
        """Logits of the largest block."""
        sizes = ([s.stop - s.start for s in blocks] for blocks in (self.context_blocks, self.vocab_blocks))
        return math.prod(max(size, default=0) for size in sizes)

    def logits(self, hidden_CD: Tensor, vocab: slice, room: _Room) -> Tensor:
        """Float32 logits (C, B) of a block before any temperature, in the room for them."""
        bias_B = None if self.bias_V is None else self.bias_V[vocab]
        products_CB = product_in(room.products, hidden_CD, self.weight_VD[vocab], bias_B)
        if products_CB.dtype != torch.float32:
            products_CB = copy_in(room.logits, products_CB)
        return _bounded(products_CB, self.spec)


@dataclass(frozen=True, slots=True)
class _Room:
    """Flat memory for a block, used for one after another: on a CPU fresh memory for each would take longer
    to get than to fill. `logits` and `weights` are float32, `products` of the head's dtype: where that is
    float32, too, they are the logits. `part` is for the weight's gradient in another dtype and in float32."""

    logits: Tensor
    weights: Tensor
    products: Tensor
    part: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, head: _Head, *, is_backward: bool) -> _Room:
        weight_VD = head.weight_VD
        logits = weight_VD.new_empty(head.cells, dtype=torch.float32)
        weights = logits.new_empty(0 if is_backward else head.cells)
        if weight_VD.dtype == torch.float32:
            return cls(logits, weights, logits, (weights, weights))
        widest = max((s.stop - s.start for s in head.vocab_blocks), default=0)
        room = widest * weight_VD.shape[1] if is_backward else 0
        part = weight_VD.new_empty(room), logits.new_empty(room)
        return cls(logits, weights, weight_VD.new_empty(head.cells), part)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _divide(logits_CB: Tensor, temperature_C: Tensor) -> Tensor:
    """Divide in place by the temperatures; nothing is done where they are 1 and asking costs nothing."""
    if temperature_C.device.type == "cpu" and bool((temperature_C == 1.0).all()):
        return logits_CB
    return logits_CB.div_(temperature_C[:, None])


def _cells(context_N: Tensor, target_N: Tensor, rows: slice, vocab: slice) -> tuple[Tensor, Tensor]:
    """Where each target lies in a flat block (0 where it is in another), and whether it is in another."""
    row_N, column_N = context_N - rows.start, target_N - vocab.start
    height, width = rows.stop - rows.start, vocab.stop - vocab.start
    is_inside_N = (row_N >= 0) & (row_N < height) & (column_N >= 0) & (column_N < width)
    return (row_N * width + column_N) * is_inside_N, ~is_inside_N


@dataclass(slots=True)
class _Softmax:
    """Softmax statistics of some contexts over the blocks of the vocabulary that were added.

    `peak` is the largest logit, `mass` the sum of exp(logit - peak), `moment` that sum weighted with (logit -
    peak); each (C, 1). `scratch` is flat and has room for a block.
    """

    peak: Tensor
    mass: Tensor
    moment: Tensor
    scratch: Tensor

    @classmethod
    def empty(cls, num_contexts: int, scratch: Tensor) -> _Softmax:
        zero = scratch.new_zeros(num_contexts, 1)
        # The least number and not -inf, of which a difference with itself would be NaN.
        return cls(torch.full_like(zero, torch.finfo(zero.dtype).min), zero, zero, scratch)

    def add(self, logits_CB: Tensor) -> None:
        """Take a block in; it is left holding its values less the new peak."""
        peak = torch.maximum(self.peak, logits_CB.amax(dim=1, keepdim=True))
        fall = self.peak - peak
        logits_CB -= peak
        weight_CB = torch.exp(logits_CB, out=self.scratch[: logits_CB.numel()].view_as(logits_CB))
        mass = weight_CB.sum(dim=1, keepdim=True)
        moment = weight_CB.mul_(logits_CB).sum(dim=1, keepdim=True)
        self.moment = fall.exp() * (self.moment + self.mass * fall) + moment
        self.mass = fall.exp() * self.mass + mass
        self.peak = peak

    def results(self) -> tuple[Tensor, Tensor]:
        """Entropy, and log of the sum of exp, each (C,)."""
        log_mass = self.mass.log()
        return (log_mass - self.moment / self.mass)[:, 0], (self.peak + log_mass)[:, 0]


class _ChunkedStats(torch.autograd.Function):
    """Log-probability per token and entropy per context. With `gradient_of` the backward pass adds the
    weight's gradient to what that says, and autograd hears of none.

    The backward pass computes each block's logits again, unless one block held them all. Its outer loop is
    over the vocabulary, so that each part of the weight's gradient is written once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        context_N: Tensor,
        target_N: Tensor,
        temperature_U: Tensor,
        spec: HeadSpec,
        gradient_of: GradientOf | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head.over(hidden_UD.shape[0], weight_VD, bias_V, spec)
        stats_2U = torch.empty((2, hidden_UD.shape[0]), dtype=torch.float32, device=hidden_UD.device)
        room = _Room.of(head, is_backward=False)
        chosen_N = stats_2U.new_zeros(target_N.shape)
        kept_UV: Tensor | None = None
        for rows in head.context_blocks:
            softmax = _Softmax.empty(rows.stop - rows.start, room.weights)
            for vocab in head.vocab_blocks:
                kept_UV = _divide(head.logits(hidden_UD[rows], vocab, room), temperature_U[rows])
                cell_N, is_outside_N = _cells(context_N, target_N, rows, vocab)
                chosen_N += kept_UV.view(-1)[cell_N].masked_fill_(is_outside_N, 0.0)
                softmax.add(kept_UV)
            stats_2U[:, rows] = torch.stack(softmax.results())
            if head.keeps_logprobs and kept_UV is not None:
                kept_UV -= softmax.mass.log()
        entropy_U, normaliser_U = stats_2U.unbind()
        ctx.save_for_backward(
            hidden_UD,
            weight_VD,
            bias_V,
            context_N,
            target_N,
            temperature_U,
            entropy_U,
            normaliser_U,
            kept_UV if head.keeps_logprobs else None,
        )
        # What is saved may come back as another tensor, whose gradient nobody reads.
        ctx.head, ctx.gradient_of, ctx.own_VD = head, gradient_of, weight_VD
        ctx.set_materialize_grads(False)
        return chosen_N - normaliser_U[context_N], entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_U: Tensor | None) -> tuple[Any, ...]:
        hidden_UD, weight_VD, bias_V, *_ = ctx.saved_tensors
        grad_hidden_UD = torch.zeros_like(hidden_UD, dtype=torch.float32)
        to_VD = heard_VD = None
        # Of a frozen head no gradient is made, which would be as large as the head.
        if ctx.needs_input_grad[1]:
            if ctx.gradient_of is not None:
                to_VD = ctx.gradient_of(ctx.own_VD)
            else:
                to_VD = heard_VD = torch.zeros_like(weight_VD)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        room = _Room.of(ctx.head, is_backward=True)
        for vocab in ctx.head.vocab_blocks:
            sums_BD = None if to_VD is None else to_VD[vocab].float()
            for rows in ctx.head.context_blocks:
                slope_CB = _slope(ctx, rows, vocab, grad_logprob_N, grad_entropy_U, room)
                if grad_bias_V is not None:
                    grad_bias_V[vocab] += slope_CB.sum(dim=0)
                if weight_VD.dtype != torch.float32:
                    slope_CB = copy_in(room.products, slope_CB)
                grad_hidden_UD[rows] += linear(slope_CB, weight_VD[vocab].t())
                if sums_BD is not None:
                    add_transposed_product(sums_BD, slope_CB, hidden_UD[rows], room.part)
            if to_VD is not None and to_VD.dtype != torch.float32:
                to_VD[vocab] = sums_BD
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_UD.to(hidden_UD.dtype), heard_VD, grad_bias, *(None,) * 5


def _slope(
    ctx: Any,
    rows: slice,
    vocab: slice,
    grad_logprob_N: Tensor | None,
    grad_entropy_U: Tensor | None,
    room: _Room,
) -> Tensor:
    """The loss's derivative by the products hidden @ weight.T of a block, float32 (C, B)."""
    hidden_UD, *_, context_N, target_N, temperature_U, entropy_U, normaliser_U, kept_UV = ctx.saved_tensors
    head: _Head = ctx.head
    spec, damping_CB = head.spec, None
    if kept_UV is not None:
        logprobs_CB = kept_UV
    else:
        logits_CB = head.logits(hidden_UD[rows], vocab, room)
        if spec.softcap is not None:
            damping_CB = 1.0 - (logits_CB / spec.softcap) ** 2
        logprobs_CB = _divide(logits_CB, temperature_U[rows]).sub_(normaliser_U[rows, None])
    factor = torch.zeros_like(normaliser_U)
    if grad_logprob_N is not None:
        factor.index_add_(0, context_N, grad_logprob_N, alpha=-1.0)
    factor = factor[rows, None]
    if grad_entropy_U is not None:
        factor = (logprobs_CB + entropy_U[rows, None]).mul_(-grad_entropy_U[rows, None]).add_(factor)
    slope_CB = (logprobs_CB.exp() if kept_UV is not None else logprobs_CB.exp_()).mul_(factor)
    if grad_logprob_N is not None:
        cell_N, is_outside_N = _cells(context_N, target_N, rows, vocab)
        slope_CB.view(-1).scatter_add_(0, cell_N, grad_logprob_N.masked_fill(is_outside_N, 0.0))
    slope_CB = _divide(slope_CB, temperature_U[rows])
    if damping_CB is not None:
        slope_CB *= damping_CB
    if spec.scale != 1.0:
        slope_CB *= spec.scale
    return slope_CB


def token_stats(
    hidden_UD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    context_N: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    spec: HeadSpec,
    gradient_of: GradientOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target_N` and entropy (nats), both float32 (N,), of softmax(logits / temperature).

    Token n is predicted from `hidden_UD[context_N[n]]`; tokens of one context have one temperature.
    With `gradient_of` a backward pass adds the weight's gradient to what that says by itself.
    """
    temperature_U = temperature_N.new_ones(hidden_UD.shape[0]).index_copy_(0, context_N, temperature_N)
    logprob_N, entropy_U = _ChunkedStats.apply(
        hidden_UD, weight_VD, bias_V, context_N, target_N, temperature_U, spec, gradient_of
    )
    return logprob_N, entropy_U.index_select(0, context_N)
