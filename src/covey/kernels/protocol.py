"""The seam: what kernels compute, and what they are given.

Axes: T tokens of a stream, L keys, H query heads, K key heads, D head width, E model width, N trained tokens,
U contexts, C contexts of a block, V vocabulary, B columns of a block, n new tokens, b rows of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from covey.kernels.draws import Drawn, Filters
from covey.kernels.gpu.recordings import Recordings
from covey.types import MicroBatch, StreamSegment


class Kernels(Protocol):
    """One way to compute what a policy and its sampler spend their time on.

    Nothing here holds a weight: what is made of weights (a decoder) is asked for again by every rollout.
    """

    @property
    def name(self) -> str:
        """torch, cpu or gpu."""

    @property
    def products(self) -> Products:
        """Matrix products outside of the model's own modules."""

    @property
    def stride(self) -> int:
        """Tokens that each row decodes before the host reads which rows have ended."""

    @property
    def is_compiled(self) -> bool:
        """Whether plain attention and blocks of the head are computed in C."""

    def prepare(self, model: nn.Module) -> None:
        """Change the modules of a model once it is loaded, and how this process gets memory."""

    def pad(self, micro: MicroBatch, weight_VD: Tensor, spec: HeadSpec) -> MicroBatch:
        """The same micro-batch in a size that kernels exist for; what is added has no effect."""

    def stream(
        self, segments: Sequence[StreamSegment], first: int, device: torch.device | str
    ) -> StreamAttention:
        """Attention over a stream whose queries begin with token `first`."""

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> HeadBlocks:
        """What is computed of blocks of an output embedding."""

    def decoder(self, model: SampledModel, num_positions: int, former: Decoder | None = None) -> Decoder:
        """A step of decoding for tokens up to position `num_positions`, by the weights as they are now. A
        `former` one that still serves may be brought up to date and returned."""

    def compiles(self, model: SampledModel) -> bool:
        """Whether its decoder of this model is in C."""

    def recordings(self) -> Recordings | None:
        """What records strides of decoding for one engine; None where none are recorded."""


# -- products


class Products(Protocol):
    """Matrix products with a weight; all tensors of one dtype."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias, as `torch.nn.functional.linear`."""

    def linear_into(self, memory: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """The same of x (N, K) without a gradient, in flat `memory` where that can be."""

    def add_transposed(self, to_NK: Tensor, left_TN: Tensor, right_TK: Tensor, /) -> None:
        """Add left.T @ right to a matrix."""


# -- attention over a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer asks of its attention beyond queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax and nothing else, but for a window."""
        return self.softcap is None and self.sinks_H is None and self.dropout == 0.0


class StreamAttention(Protocol):
    """Attention of one stream, planned once and used by every layer."""

    def attend(
        self, query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, options: AttentionOptions, /
    ) -> Tensor:
        """Output (T, H, D). Keys and values are of all tokens, queries of those from `first` on."""


# -- blocks of the head


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How hidden states become logits: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`.

    `block` is how many contexts and logits are held at once; None is what suits the device. `banned` tokens
    (ascending) are in no softmax.
    """

    scale: float = 1.0
    softcap: float | None = None
    block: tuple[int, int] | None = None
    banned: tuple[int, ...] = ()

    def block_for(self, weight_VD: Tensor) -> tuple[int, int]:
        """Contexts and logits that are held at once: contexts are more where the vocabulary is small."""
        contexts, cells = self.block or _BLOCK["cpu" if weight_VD.device.type == "cpu" else "gpu"]
        return max(contexts, cells // weight_VD.shape[0]), cells

    def hide(self, logits_XB: Tensor, vocab: slice) -> None:
        """Make the logits of banned tokens so small that they have no probability and no gradient, in a block
        of the vocabulary. They stay finite: 0 times minus infinity is not a number."""
        inside = [i - vocab.start for i in self.banned if vocab.start <= i < vocab.stop]
        if inside:
            least = max(_HIDDEN, torch.finfo(logits_XB.dtype).min)
            logits_XB.index_fill_(1, torch.tensor(inside, device=logits_XB.device), least)

    def bounded(self, logits_NV: Tensor) -> Tensor:
        """Logits of products, which are float32."""
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


# Its square is a float32, and its exponential is 0 at each temperature that one samples at.
_HIDDEN = -1e15

# Contexts of a block at least, and its logits: 2 Mi values are 8 MiB in float32, which stay in a CPU's cache;
# on a GPU products have to be larger to fill it.
_BLOCK = {"cpu": (2048, 1 << 21), "gpu": (4096, 1 << 26)}


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """Flat memory for a block, used for one block after another: on a CPU new memory for each would take
    longer to get than to fill.

    `products` and `part`, of the weight's gradient, are of the head's dtype, `logits` and `scratch` float32.
    Where products are float32 they are the logits. A buffer that is not used has no elements.
    """

    products: Tensor
    logits: Tensor
    scratch: Tensor
    part: Tensor


@dataclass(frozen=True, slots=True)
class HeadTokens:
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
class HeadStats:
    """What the forward pass computes: of each token its logit, over its temperature, and of each context the
    entropy and the log of the sum of exp. All float32."""

    logit_N: Tensor
    entropy_U: Tensor
    normaliser_U: Tensor


@dataclass(frozen=True, slots=True)
class HeadGradients:
    """The loss's derivatives by the log-probability of each token and by the entropy of each context; None
    is 0."""

    by_logprob_N: Tensor | None
    by_entropy_U: Tensor | None

    def by_context(self, tokens: HeadTokens) -> Tensor:
        """The sum of the first over the tokens of each context (U,)."""
        sum_U = torch.zeros_like(tokens.temperature_U)
        if self.by_logprob_N is None:
            return sum_U
        return sum_U.index_add_(0, tokens.context_N, self.by_logprob_N)


class Softmax(Protocol):
    """Softmax statistics of some contexts over the blocks of the vocabulary that are added."""

    def add(self, products_CB: Tensor, vocab: slice) -> None:
        """Take a block in, whose products may be overwritten, and write the logits of its tokens."""

    def results(self) -> tuple[Tensor, Tensor]:
        """Entropy, and log of the sum of exp, each (C,)."""


class Derivatives(Protocol):
    """The loss's derivative by the products hidden @ weight.T."""

    def of(self, products_CB: Tensor, rows: slice, vocab: slice) -> Tensor:
        """That of a block (C, B), whose products may be overwritten: in their dtype or in float32."""


class HeadBlocks(Protocol):
    """What is computed of blocks of an output embedding."""

    def buffers(self, weight_VD: Tensor, contexts: int, columns: int, *, is_backward: bool) -> HeadBuffers:
        """Memory for blocks of at most so many contexts and columns."""

    def softmax(self, tokens: HeadTokens, rows: slice, logit_N: Tensor, buffers: HeadBuffers) -> Softmax:
        """Of the contexts of `rows`; logits of tokens are written to `logit_N`."""

    def derivatives(
        self, tokens: HeadTokens, stats: HeadStats, gradients: HeadGradients, buffers: HeadBuffers
    ) -> Derivatives:
        """Of all blocks."""

    def add_to_sum(self, sum_XD: Tensor, product_XD: Tensor, buffers: HeadBuffers) -> None:
        """Add a product of the head's dtype to a float32 sum."""


# -- decoding


class Layout(Protocol):
    """The attention of a stream or of rows of a cache, layer by layer; what a `covey_layout` argument is."""

    def attend(
        self,
        layer: int,
        query_1HTD: Tensor,
        key_1KTD: Tensor,
        value_1KTD: Tensor,
        options: AttentionOptions,
        /,
    ) -> Tensor: ...


class SampledModel(Protocol):
    """What a decoder needs of a policy."""

    model: nn.Module
    head: HeadSpec

    @property
    def device(self) -> torch.device: ...

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, /) -> Tensor:
        """Last hidden states (T, E) of a stream, by the model's own modules."""

    def logits(self, hidden_ND: Tensor, /) -> Tensor:
        """Float32 logits (N, V) of hidden states, before temperature."""

    def logits_of(self, products_NV: Tensor, /) -> Tensor:
        """Return the logits that float32 products of the head stand for."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which keys each new token sees, (n,) each: `count` of its prompt's slot and then of its own row, from
    the first column on. It is itself the last of them."""

    slot: Tensor
    slot_first: Tensor
    slot_count: Tensor
    row: Tensor
    row_first: Tensor
    row_count: Tensor


class Cache(Protocol):
    """Where keys and values are."""

    def tensors(self, layer: int, like_1KTD: Tensor, /) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of prompts and of rows, (2, slots, K, columns, D) each."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """Copy columns of rows onto other rows, of which none is both."""


class CacheLayout(Layout, Protocol):
    """Attention of new tokens whose keys and values go to a cache."""

    @property
    def cache(self) -> Cache:
        """Where keys and values go."""

    @property
    def longest(self) -> int:
        """The most tokens that one of them sees."""

    def spans(self, positions_n: Tensor, /) -> Spans | None:
        """What each token sees; None where another way of attention is the faster one."""

    def attend_heads(self, layer: int, heads_nXD: Tensor, queries: int, scaling: float, /) -> Tensor:
        """Plain attention (n, H, D) of heads side by side: `queries` heads, then keys, then values."""


class StepLayout(CacheLayout, Protocol):
    """A layout of one new token a row, of which it is always known what it sees."""

    def spans(self, positions_n: Tensor, /) -> Spans:
        """What each token sees."""


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """What rows draw by, (n,) each: temperature, noise key and position; `table_V` is a token's share of the
    noise.

    `shared_n` says whose hidden state each draws from, `lead_b` which row is the first of each state's; None
    where every row has its own. `stops` are the tokens that end a row. Without `filters` no row has one.
    """

    temperature_n: Tensor
    key_n: Tensor
    position_n: Tensor
    table_V: Tensor
    shared_n: Tensor | None = None
    lead_b: Tensor | None = None
    stops: tuple[int, ...] = ()
    filters: Filters | None = None


class Decoder(Protocol):
    """Computes new tokens behind a cache, by the weights as they were when it was asked for."""

    @property
    def is_compiled(self) -> bool:
        """Whether it is in C: it takes any number of rows, and is kept from one rollout to the next."""

    @property
    def sampler(self) -> Sampler | None:
        """What draws tokens in the same call; None where the engine samples from `logits`."""

    def hidden(self, tokens_n: Tensor, positions_n: Tensor, layout: CacheLayout, /) -> Tensor:
        """Last hidden states (n, E) of the new tokens."""

    def logits(self, hidden_nE: Tensor, /) -> Tensor:
        """Float32 logits (n, V), before temperature."""

    def copy_rows(
        self, cache: Cache, sources: Sequence[int], targets: Sequence[int], columns: range, /
    ) -> None:
        """Copy columns of rows of a cache onto other rows, of which none is both."""


class Sampler(Protocol):
    """Draws as `covey.rollout.noise.sample` does, to the token."""

    def draw(self, hidden_nE: Tensor, inputs: DrawInputs, /) -> Drawn:
        """Draw a token for each row (n,)."""

    def decode(
        self, tokens_b: Tensor, positions_b: Tensor, layout: StepLayout, inputs: DrawInputs, most: int, /
    ) -> Drawn:
        """Feed tokens and draw the next ones, `most` times or until a row draws a token that ends it or
        another one than a row that shares its state: k tokens for each row, (k, n)."""
