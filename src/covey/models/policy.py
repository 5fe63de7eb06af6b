"""The policy: backbone and chunked head in one forward pass.

A head outside the wrapped module leaves its gradient unsynchronised under DDP, so both live in
`Policy.forward`, and nothing calls below the wrapper while training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from covey.kernels.choose import choose_kernels
from covey.kernels.kept import select
from covey.kernels.protocol import HeadSpec, Kernels, Layout
from covey.media.parts import is_frozen, part_of
from covey.models.activations import offloaded, set_recompute
from covey.models.attention import ATTENTION_NAME
from covey.models.dropout import dropouts
from covey.models.head import head_spec, token_stats
from covey.models.layouts import AttentionKind, stream_layout
from covey.models.prefix import Prefix
from covey.models.vision.tower import Vision, WithoutImages
from covey.plan.recompute import Recompute
from covey.token_streams import StreamKind
from covey.types import MediaTokens, MicroBatch, SharedPrompt, StreamSegment, TokenStats
from covey.types.media import Part

if TYPE_CHECKING:
    from covey.models.lora import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """How a policy lays rows out, as the probe has proven it; `no_flex` says why flex attention was given up,
    where it was."""

    stream: StreamKind
    attention: AttentionKind
    no_flex: str = ""
    shares_prompts: bool


def narrowest(layouts: Sequence[RowLayout]) -> RowLayout:
    """The layout that holds where each of these does; their attention is the same."""
    kinds: tuple[StreamKind, ...] = ("padded", "packed", "prefix")
    return RowLayout(
        stream=min((layout.stream for layout in layouts), key=kinds.index),
        attention=layouts[0].attention,
        no_flex=next((layout.no_flex for layout in layouts if layout.no_flex), ""),
        shares_prompts=all(layout.shares_prompts for layout in layouts),
    )


class Policy(nn.Module):
    """A causal language model of transformers that says logprob and entropy of the trained tokens of a
    micro-batch.

    `stream` is how its rows may be laid out: `prefix` shares a prompt between siblings, `packed` lays rows
    end to end, `padded` uses rows of their own and the model's own attention. `attention` is what computes
    the attention of a stream. `recompute` and `offload` say what is kept for the backward pass, and where;
    `has_liger` that norms and gated layers run by liger-kernel. `shares_prompts` says whether a prompt whose
    rows take several micro-batches is computed in the first of them alone: they are forwarded in their order.
    `adapter` is what `lora.add_adapter` has put on the model. `without_images` is for a model that sees and
    whose weights ranks share.
    """

    def __init__(
        self, model: nn.Module, *, stream: StreamKind = "prefix", kernels: Kernels | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._kernels = kernels
        self.adapter: Adapter | None = None
        self.head: HeadSpec = head_spec(model)
        # On the device: a recorded stride of decoding takes nothing from the host.
        self._banned_X: Tensor | None = None
        self.stream: StreamKind = "padded"
        self.attention: AttentionKind = "sdpa"
        # Why flex attention was given up, where it was.
        self.no_flex = ""
        self.recompute: Recompute = "none"
        self.offload = False
        self.has_liger = False
        # Where shards of the weights come together, if they are not where it computes.
        self.runs_on: torch.device | None = None
        self.shares_prompts = True
        self._prefix: Prefix | None = None
        self.vision = Vision.of(model)
        self.without_images: WithoutImages = "skip"
        config: Any = model.config
        self._family: str = config.model_type
        config = config.get_text_config()
        # Fused attention drops soft-capping without a word; transformers 5.17 picks it for Gemma 2.
        is_capped = getattr(config, "attn_logit_softcapping", None) is not None
        own = config._attn_implementation
        self._own_attention: str = "eager" if is_capped and own == "sdpa" else own
        self.use_stream(stream)

    def use_stream(self, stream: StreamKind) -> None:
        """Choose the layout; the model's attention is switched with it."""
        wanted = self._own_attention if stream == "padded" else ATTENTION_NAME
        # The vision tower keeps its own.
        named = wanted if self.vision is None else {"text_config": wanted}
        self.model.set_attn_implementation(named)  # type: ignore[operator]
        self.stream = stream

    @property
    def layout(self) -> RowLayout:
        """How rows are laid out now."""
        return RowLayout(
            stream=self.stream,
            attention=self.attention,
            no_flex=self.no_flex,
            shares_prompts=self.shares_prompts,
        )

    def use_layout(self, layout: RowLayout) -> None:
        """Choose the layout, and what computes its attention."""
        self.attention, self.no_flex = layout.attention, layout.no_flex
        self.shares_prompts = layout.shares_prompts
        self.use_stream(layout.stream)

    def freeze(self, parts: Collection[Part]) -> None:
        """Train parts of a model that sees images no longer: their weights have no gradient."""
        for name, parameter in self.named_parameters():
            if is_frozen(name, self._family, parts):
                parameter.requires_grad_(False)

    def part_of(self, name: str) -> Part:
        """Return the part of the model that a tensor or a module belongs to."""
        return part_of(name, self._family)

    @property
    def trained_parts(self) -> frozenset[Part]:
        """Return the parts of which a step changes anything."""
        return frozenset(self.part_of(n) for n, p in self.named_parameters() if p.requires_grad)

    def keep_activations(self, recompute: Recompute, *, offload: bool = False) -> None:
        """Choose which activations are computed again in the backward pass, and whether the others leave the
        device."""
        set_recompute(self.model, recompute)
        self.recompute, self.offload = recompute, offload

    def forward(self, micro: MicroBatch) -> TokenStats:
        """Logprob and entropy (N,) at each token's sampling temperature, in float32."""
        if self.shares_prompts and self.stream == "prefix" and micro.shared is not None:
            return self._behind_prompt(micro, micro.shared)
        return self._pass(micro)

    def _pass(self, micro: MicroBatch, prefix: Prefix | None = None) -> TokenStats:
        """The stats of a micro-batch; behind a `prefix`, or for one, as that says."""
        if self.stream != "padded":
            micro = self.kernels.pad(micro, self._head.weight, self.head)
        with offloaded(self) if self.offload and torch.is_grad_enabled() else nullcontext():
            if micro.num_rows > 1 or self.stream == "padded":
                hidden_TD = self._hidden_padded(micro)
            else:
                segments, device = micro.segments, micro.tokens_T.device
                layout = stream_layout(self.attention, segments, device, self.kernels, prefix)
                hidden_TD = self.hidden(micro.tokens_T, micro.positions_T, layout, micro.media)
        return self._stats(hidden_TD, micro)

    def _behind_prompt(self, micro: MicroBatch, shared: SharedPrompt) -> TokenStats:
        """The same of a micro-batch that shares a prompt with those around it: the first of them computes it,
        with all tokens that its last position predicts, and the others go on from it."""
        end = micro.segments[0].length
        if not shared.follows:
            self._prefix = Prefix(end)
            self._pass_of_prompt(micro, shared, self._prefix)
        prefix = self._prefix
        assert prefix is not None and prefix.length == end, "micro-batches of a prompt follow each other"
        prefix.is_last = not shared.is_followed
        if prefix.is_last:
            self._prefix = None
        segments, first = micro.segments, end
        if micro.tokens_T.shape[0] == end:
            # Completions of one token need none but the prompt. The prompt's last token takes part once more,
            # from which nothing is predicted, so that the passes before this one reach the prompt's.
            segments, first = (*segments, StreamSegment(start=end, length=1, parent=0)), end - 1
        # The first context is the prompt's last token, if that predicts anything here.
        before = int(shared.own_X.shape[0] < micro.context_N.shape[0])
        rest = replace(
            micro,
            tokens_T=micro.tokens_T[first:],
            positions_T=micro.positions_T[..., first:],
            segments=segments,
            media=None if micro.media is None else micro.media.part(first, len(micro.tokens_T)),
            context_U=micro.context_U[before:] - end,
            context_N=micro.context_N[shared.own_X] - before,
            target_N=micro.target_N[shared.own_X],
            temperature_N=micro.temperature_N[shared.own_X],
            kept=None if micro.kept is None else select(micro.kept, shared.own_X),
        )
        *own, within = self._pass(rest, prefix)
        stats: tuple[Tensor, ...] = prefix.extend(("logprob", "entropy"), own)
        if within is not None:
            stats = *stats, torch.cat([prefix.take("kept_entropy"), within])
        return TokenStats(*(part.index_select(0, shared.index_N) for part in stats))

    def _pass_of_prompt(self, micro: MicroBatch, shared: SharedPrompt, prefix: Prefix) -> None:
        """The pass over a prompt alone, for a prefix."""
        end, device = prefix.length, micro.tokens_T.device
        alone = replace(
            micro,
            tokens_T=micro.tokens_T[:end],
            positions_T=micro.positions_T[..., :end],
            segments=micro.segments[:1],
            media=None if micro.media is None else micro.media.part(0, end),
            context_U=torch.full((1,), end - 1, device=device),
            context_N=torch.zeros_like(shared.target_F),
            target_N=shared.target_F,
            temperature_N=shared.temperature_F,
            kept=shared.kept_F,
        )
        names = ("logprob", "entropy", "kept_entropy")
        for name, part in zip(names, self._pass(alone, prefix), strict=True):
            if part is not None:
                prefix.keep(name, part)

    @contextmanager
    def recomputing_prompts(self) -> Iterator[None]:
        """Within it each forward pass computes the prompts of its rows itself, whatever is around it; not so
        of a model with dropout, which is drawn once for a prompt and not again for each pass."""
        before = self.shares_prompts
        self.shares_prompts = before and bool(dropouts(self.model))
        try:
            yield
        finally:
            self.shares_prompts = before

    def _stats(self, hidden_TD: Tensor, micro: MicroBatch) -> TokenStats:
        weight_VD, bias_V = self._head.weight, getattr(self._head, "bias", None)
        taken_UD = hidden_TD.index_select(0, micro.context_U)
        targets = micro.context_N, micro.target_N, micro.temperature_N
        return token_stats(taken_UD, weight_VD, bias_V, *targets, self.head, self.kernels, micro.kept)

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, media: MediaTokens | None = None
    ) -> Tensor:
        """Last hidden states (T, D) of a stream under `layout`; positions are (T,), or (3, T)."""
        return self._hidden(tokens_T[None], positions_T.unsqueeze(-2), media, covey_layout=layout)

    def _hidden_padded(self, micro: MicroBatch) -> Tensor:
        # Rows are padded on the right: under causal attention, and in a recurrent layer, no real token sees a
        # pad.
        tokens_RT = micro.tokens_T.view(micro.num_rows, -1)
        return self._hidden(tokens_RT, micro.positions_T.unflatten(-1, tokens_RT.shape), micro.media)

    def _hidden(
        self, tokens_RT: Tensor, positions_RT: Tensor, media: MediaTokens | None, **options: Any
    ) -> Tensor:
        """Last hidden states (R x T, D) of rows."""
        backbone: Any = self.model.base_model
        options |= {"position_ids": positions_RT, "use_cache": False}
        embedded: dict[str, Any] = {}
        if self.vision is not None:
            options |= self.vision.beside_text(tokens_RT)
            if media is None:
                embedded = self.vision.without_images(backbone, tokens_RT, self.without_images)
            else:
                embedded = self.vision.embedded(backbone, tokens_RT, media)
        assert media is None or embedded, "images come to a model that sees"
        if self.vision is not None and embedded:
            out = backbone.get_submodule(self.vision.text)(**embedded, **options)
        else:
            out = backbone(input_ids=tokens_RT, **options)
        return out.last_hidden_state.flatten(0, 1)  # type: ignore[no-any-return]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits (N, V) of hidden states, as the loss sees them, before temperature."""
        weight_VD, bias_V = self._head.weight, getattr(self._head, "bias", None)
        return self.logits_of(self.kernels.products.linear(hidden_ND, weight_VD, bias_V).float())

    def logits_of(self, products_NV: Tensor) -> Tensor:
        """Return the logits that float32 products of the head stand for: minus infinity for banned tokens."""
        logits_NV = self.head.bounded(products_NV)
        if self.head.banned:
            if self._banned_X is None or self._banned_X.device != logits_NV.device:
                self._banned_X = torch.tensor(self.head.banned, device=logits_NV.device)
            logits_NV.index_fill_(1, self._banned_X, float("-inf"))
        return logits_NV

    @property
    def kernels(self) -> Kernels:
        """What computes the heavy parts: what was given, else what suits the device at the first use."""
        if self._kernels is None:
            self._kernels = choose_kernels("auto", self.device.type)
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @property
    def vocab(self) -> int:
        """Numbers of a row of logits."""
        return int(self._head.weight.shape[0])

    @property
    def _head(self) -> Any:
        """The output embedding."""
        return self.model.get_output_embeddings()  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Where the policy computes: where its weights are, or where their shards come together."""
        return self.runs_on or next(self.parameters()).device
