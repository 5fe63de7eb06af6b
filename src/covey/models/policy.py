"""The policy: backbone and chunked head in one forward pass.

A head outside the wrapped module leaves its gradient unsynchronised under DDP, so both live in
`Policy.forward`, and nothing calls below the wrapper while training.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from covey.models import llama_update
from covey.models.activations import offloaded, set_recompute
from covey.models.attention import ATTENTION_NAME, Layout, StreamLayout
from covey.models.head import HeadSpec, head_spec, logits_of, token_stats
from covey.models.layouts import AttentionKind, StreamKind, stream_layout
from covey.models.linear import is_kept_by_size
from covey.models.llama import Llama
from covey.models.native.library import open_library
from covey.models.rounding import in_few_sizes
from covey.plan.recompute import Recompute
from covey.types import MicroBatch, TokenStats

if TYPE_CHECKING:
    from covey.models.lora import Adapter

__all__ = ["Policy", "StreamKind"]


class Policy(nn.Module):
    """A causal language model of transformers that says logprob and entropy of the trained tokens of a
    micro-batch.

    `stream` is how its rows may be laid out: `prefix` shares a prompt between siblings, `packed` lays rows
    end to end, `padded` uses rows of their own and the model's own attention. `attention` is what computes
    the attention of a stream. `recompute` and `offload` say what is kept for the backward pass, and where;
    `has_liger` that norms and gated layers run by liger-kernel.
    `adapter` is what `lora.add_adapter` has put on the model.
    """

    def __init__(self, model: nn.Module, *, stream: StreamKind = "prefix") -> None:
        super().__init__()
        self.model = model
        self.adapter: Adapter | None = None
        self.head: HeadSpec = head_spec(model)
        self.stream: StreamKind = "padded"
        self.attention: AttentionKind = "sdpa"
        self.recompute: Recompute = "none"
        self.offload = False
        self.has_liger = False
        config: Any = model.config
        # Fused attention drops soft-capping without a word; transformers 5.17 picks it for Gemma 2.
        is_capped = getattr(config, "attn_logit_softcapping", None) is not None
        own = config._attn_implementation
        self._own_attention: str = "eager" if is_capped and own == "sdpa" else own
        self.use_stream(stream)

    def use_stream(self, stream: StreamKind) -> None:
        """Choose the layout; the model's attention is switched with it."""
        wanted = self._own_attention if stream == "padded" else ATTENTION_NAME
        self.model.set_attn_implementation(wanted)  # type: ignore[operator]
        self.stream = stream

    def keep_activations(self, recompute: Recompute, *, offload: bool = False) -> None:
        """Choose which activations are computed again in the backward pass, and whether the others leave the
        device."""
        set_recompute(self.model, recompute)
        self.recompute, self.offload = recompute, offload

    def forward(self, micro: MicroBatch) -> TokenStats:
        """Logprob and entropy (N,) at each token's sampling temperature, in float32."""
        known = self._known
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        if micro.tokens_T.device.type == "cpu" and self.stream != "padded":
            is_compiled = known is not None and llama_update.is_compiled(known, self.library)
            block = self.head.block_for(head.weight)[0] if is_kept_by_size(head.weight) else None
            micro = in_few_sizes(micro, tokens=not is_compiled, block=block)
        with offloaded(self) if self.offload and torch.is_grad_enabled() else nullcontext():
            if micro.num_rows == 1 and self.stream != "padded":
                layout = stream_layout(self.attention, micro.segments, micro.tokens_T.device)
                hidden_TD = self._hidden_of(known, micro.tokens_T, micro.positions_T, layout)
            else:
                hidden_TD = self._hidden_padded(micro)
        logprob_N, entropy_N = token_stats(
            hidden_TD.index_select(0, micro.context_U),
            head.weight,
            getattr(head, "bias", None),
            micro.context_N,
            micro.target_N,
            micro.temperature_N,
            self.head,
        )
        return TokenStats(logprob_N=logprob_N, entropy_N=entropy_N)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Last hidden states (T, D) of a stream under `layout`."""
        return self._hidden_of(self._known, tokens_T, positions_T, layout)

    @property
    def _known(self) -> Llama | None:
        """The weights where a stream may take the short pass."""
        if self.recompute != "none" or self.has_liger:
            return None
        return llama_update.update_weights(self.model)

    def _hidden_of(
        self, known: Llama | None, tokens_T: Tensor, positions_T: Tensor, layout: Layout
    ) -> Tensor:
        if known is not None and isinstance(layout, StreamLayout):
            return llama_update.hidden(known, tokens_T, positions_T, layout, self.library)
        backbone: Any = self.model.base_model
        out = backbone(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, covey_layout=layout
        )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _hidden_padded(self, micro: MicroBatch) -> Tensor:
        # Rows are padded on the right: under causal attention, and in a recurrent layer, no real token sees a
        # pad.
        backbone: Any = self.model.base_model
        rows = micro.num_rows
        out = backbone(
            input_ids=micro.tokens_T.view(rows, -1),
            position_ids=micro.positions_T.view(rows, -1),
            use_cache=False,
        )
        return out.last_hidden_state.flatten(0, 1)  # type: ignore[no-any-return]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits (N, V) of hidden states, as the loss sees them, before temperature."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        return logits_of(hidden_ND, head.weight, getattr(head, "bias", None), self.head)

    @cached_property
    def library(self) -> ctypes.CDLL | None:
        """What covey computes in C, on a CPU where there is a compiler."""
        return open_library() if self.device.type == "cpu" else None

    @property
    def vocab(self) -> int:
        """Numbers of a row of logits."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        return int(head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device
