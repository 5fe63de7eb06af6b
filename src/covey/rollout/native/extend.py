"""Attention of prompts whose first tokens are in the cache already.

Axes: T new tokens of a stream, t new tokens of one prompt, L tokens of one prompt, H query heads, K key
heads, R query heads of a key head, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.kernels.protocol import AttentionOptions, Spans
from covey.rollout.native.cache import KVCache, attention_weights

# Scores that are held at once.
_CELLS = 1 << 24

Part = tuple[int, int, int]
"""The slot of a prompt, its tokens, and how many of them were there."""


class ExtendLayout:
    """A stream of what is new of some prompts: its keys and values go to the slots, and each token sees what
    its slot holds up to it. `slot_T` and `column_T` say where each token goes."""

    def __init__(self, cache: KVCache, parts: Sequence[Part], slot_T: Tensor, column_T: Tensor) -> None:
        self.cache, self.longest = cache, cache.shape.prompt
        self._parts, self._slot_T, self._column_T = parts, slot_T, column_T

    def spans(self, positions_T: Tensor) -> Spans:
        """What each token sees of its slot."""
        none = torch.zeros_like(positions_T)
        return Spans(self._slot_T, self._column_T - positions_T, positions_T + 1, none, none, none)

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, T, D)."""
        slots = self.cache.layer(layer, key_1KTD)
        pair_2TKD = torch.cat([key_1KTD, value_1KTD]).transpose(1, 2)
        slots[:, self._slot_T, :, self._column_T] = pair_2TKD.transpose(0, 1)
        out_1HTD = torch.zeros_like(query_1HTD)
        start = 0
        for slot, length, begun in self._parts:
            first, stop = self.cache.first_column(length), start + length - begun
            key_KLD, value_KLD = slots[:, slot, :, first : first + length]
            query_HtD = query_1HTD[0, :, start:stop]
            out_1HTD[0, :, start:stop] = _attended(query_HtD, key_KLD, value_KLD, begun, options)
            start = stop
        return out_1HTD

    def attend_heads(self, layer: int, heads_TXD: Tensor, queries: int, scaling: float) -> Tensor:
        """The same as (T, H, D), for plain attention of `queries` heads with the keys and values behind
        them."""
        query_1HTD, pair_1XTD = heads_TXD.transpose(0, 1)[None].tensor_split([queries], dim=1)
        key_1KTD, value_1KTD = pair_1XTD.chunk(2, dim=1)
        options = AttentionOptions(scaling=scaling)
        return self.attend(layer, query_1HTD, key_1KTD, value_1KTD, options)[0].transpose(0, 1)


def _attended(
    query_HtD: Tensor, key_KLD: Tensor, value_KLD: Tensor, begun: int, options: AttentionOptions
) -> Tensor:
    """Output (H, t, D) of the tokens from position `begun` on, some at a time."""
    length = key_KLD.shape[1]
    query_KRtD = query_HtD.unflatten(0, (key_KLD.shape[0], -1)) * options.scaling
    at_L = torch.arange(length, device=query_HtD.device)
    found = []
    for part_KRsD in query_KRtD.split(max(1, _CELLS // (length * query_HtD.shape[0])), dim=2):
        num = part_KRsD.shape[2]
        now_s1 = torch.arange(begun, begun + num, device=query_HtD.device)[:, None]
        begun += num
        visible_sL = at_L <= now_s1
        if options.sliding_window is not None:
            visible_sL &= now_s1 - at_L < options.sliding_window
        bias_sL = torch.zeros_like(visible_sL, dtype=torch.float32).masked_fill_(~visible_sL, float("-inf"))
        scores_KXL = part_KRsD.flatten(1, 2) @ key_KLD.transpose(1, 2)
        scores_sKRL = scores_KXL.unflatten(1, (-1, num)).permute(2, 0, 1, 3)
        weights_sKRL = attention_weights(scores_sKRL, bias_sL[:, None, None], options).to(value_KLD.dtype)
        out_KXD = weights_sKRL.permute(1, 2, 0, 3).flatten(1, 2) @ value_KLD
        found.append(out_KXD.unflatten(1, (-1, num)).flatten(0, 1))
    return torch.cat(found, dim=1)
