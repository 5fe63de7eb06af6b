"""The key-value cache of the native engine, and attention over it.

A prompt's keys and values lie once in a prefix slot, whatever the number of its siblings; each row has a slot
of its own for what it has generated. Both are allocated once and indexed, never concatenated.

Two layouts read them. `DecodeLayout` leaves a prompt where it is and reads it once for all siblings. Where
prompts are short that costs more calls than it saves reading: with `CacheShape.flat` a row's own slot begins
with a copy of its prompt, and `FlatLayout` attends to it in three calls.

Axes: n active rows, F prefix slots in use, M siblings of the fullest slot, K key heads, R query heads of a
key head, D head width, P prompt tokens, C completion tokens, L columns of a flat slot, T tokens of a prefill
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from covey.kernels.protocol import AttentionOptions, Spans
from covey.models.attention import StreamLayout
from covey.rollout.native.shape import CacheShape

_NUMBERS = count()


class KVCache:
    """Keys and values of every layer; a layer's tensors are made when its first prefill shows their width.

    No two caches of a process have the same `number`.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape, self.number = shape, next(_NUMBERS)
        self.prefix: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}

    def layer(self, layer: int, key_1KTD: Tensor) -> Tensor:
        """The prefix keys and values (2, slots + 1, K, P, D) of a layer."""
        if layer not in self.prefix:
            heads, width = key_1KTD.shape[1], key_1KTD.shape[3]
            # Zeros, not empty: a masked score times a NaN of uninitialised memory would be NaN.
            self.prefix[layer] = key_1KTD.new_zeros(2, self.spare_slot + 1, heads, self.shape.prompt, width)
            columns = self.start + self.shape.completion
            self.own[layer] = key_1KTD.new_zeros(2, self.shape.rows, heads, columns, width)
        return self.prefix[layer]

    @property
    def num_bytes(self) -> int:
        """What its tensors take so far."""
        return sum(t.nbytes for t in (*self.prefix.values(), *self.own.values()))

    @property
    def spare_slot(self) -> int:
        """The prefix slot behind all others, for tokens that nobody reads."""
        return self.shape.slots

    @property
    def start(self) -> int:
        """The column of a row's own slot at which its completion begins."""
        return self.shape.prompt if self.shape.flat else 0

    def start_rows(self, first: int, slot_n: Tensor, longest: int) -> None:
        """Copy the prompts of `slot_n`, of `longest` tokens at most, to the rows from number `first` on,
        where the cache is flat."""
        if not self.shape.flat:
            return
        rows, columns = slice(first, first + slot_n.shape[0]), slice(self.start - longest, self.start)
        for layer, own in self.own.items():
            own[:, rows, :, columns] = self.prefix[layer][:, :, :, columns].index_select(1, slot_n)

    def grow(self, shape: CacheShape) -> None:
        """Take a larger shape, which is not flat, one layer after the other; what rows and slots hold stays
        theirs. Its tensors are others then, and so is its number."""
        before = self.shape
        for layer, old in self.prefix.items():
            new = old.new_zeros(2, shape.slots + 1, old.shape[2], shape.prompt, old.shape[4])
            new[:, : before.slots, :, : before.prompt] = old[:, : before.slots]
            self.prefix[layer] = new
        for layer, old in self.own.items():
            new = old.new_zeros(2, shape.rows, old.shape[2], shape.completion, old.shape[4])
            new[:, : before.rows, :, : before.completion] = old
            self.own[layer] = new
        self.shape, self.number = shape, next(_NUMBERS)

    def first_column(self, prompt: int) -> int:
        """The column of a slot at which a prompt of so many tokens begins."""
        return self.shape.prompt - prompt if self.shape.flat else 0

    def tensors(self, layer: int, like_1KTD: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's prefix slots and rows."""
        return self.layer(layer, like_1KTD), self.own[layer]

    def columns(self, prompt: int, tokens: int) -> range:
        """Those of a row's own slot that hold what it has, of `prompt` tokens and so many behind it."""
        return range(max(0, self.start - prompt), self.start + tokens)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """Copy columns of rows onto other rows, of which none is both."""
        span = slice(columns.start, columns.stop)
        for own in self.own.values():
            for source, target in zip(sources, targets, strict=True):
                own[:, target, :, span] = own[:, source, :, span]


class PrefillLayout:
    """A stream of whole prompts: plain stream attention, whose keys and values go to the prefix slots, token
    by token to `slot_T` and `column_T`."""

    def __init__(self, cache: KVCache, stream: StreamLayout, slot_T: Tensor, column_T: Tensor) -> None:
        self._cache, self._stream = cache, stream
        self._slot_T, self._column_T = slot_T, column_T
        self.cache, self.longest = cache, cache.shape.prompt

    def spans(self, positions_n: Tensor) -> Spans | None:
        """What each token sees of its prompt; None where prompts are long: then it pays to take many queries
        at once."""
        if not self._cache.shape.flat:
            return None
        none = torch.zeros_like(positions_n)
        return Spans(self._slot_T, self._column_T - positions_n, positions_n + 1, none, none, none)

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, T, D) of the prompts."""
        pair_2TKD = torch.cat([key_1KTD, value_1KTD]).transpose(1, 2)
        self._cache.layer(layer, key_1KTD)[:, self._slot_T, :, self._column_T] = pair_2TKD.transpose(0, 1)
        return self._stream.attend(layer, query_1HTD, key_1KTD, value_1KTD, options)

    def attend_heads(self, layer: int, heads_TXD: Tensor, queries: int, scaling: float) -> Tensor:
        """The same as (T, H, D), for plain attention of `queries` heads with the keys and values behind
        them."""
        query_1HTD, pair_1XTD = heads_TXD.transpose(0, 1)[None].tensor_split([queries], dim=1)
        key_1KTD, value_1KTD = pair_1XTD.chunk(2, dim=1)
        options = AttentionOptions(scaling=scaling)
        return self.attend(layer, query_1HTD, key_1KTD, value_1KTD, options)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Families:
    """Which rows read which prefix slot: `row_FM` (padded with row 0) and each row's index in it, flat.
    `position_n` are the positions of what stands right behind their prompts."""

    prompt_length_n: Tensor
    position_n: Tensor
    row_FM: Tensor
    index_n: Tensor
    longest_prompt: int
    shortest_prompt: int

    @classmethod
    def of(
        cls,
        prompt_length_n: Tensor,
        position_n: Tensor,
        slots: Sequence[int],
        longest: int,
        shortest: int,
        num_slots: int = 0,
        fullest: int = 0,
    ) -> Families:
        """Rows of these `slots`, and spare ones behind them as lengths say; for so many slots and siblings at
        least."""
        members: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            members.setdefault(slot, []).append(i)
        fullest = max(fullest, *map(len, members.values()))
        row_FM = torch.zeros(max(num_slots, max(members) + 1), fullest, dtype=torch.long)
        index_n = torch.zeros(len(prompt_length_n), dtype=torch.long)
        for slot, rows in members.items():
            row_FM[slot, : len(rows)] = torch.tensor(rows)
            index_n[rows] = slot * fullest + torch.arange(len(rows))
        device = prompt_length_n.device
        return cls(prompt_length_n, position_n, row_FM.to(device), index_n.to(device), longest, shortest)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step reads of it."""
        return self.prompt_length_n, self.position_n, self.row_FM, self.index_n

    def at(self, tensors: Sequence[Tensor]) -> Families:
        """The same with its tensors elsewhere."""
        length_n, position_n, row_FM, index_n = tensors
        return Families(length_n, position_n, row_FM, index_n, self.longest_prompt, self.shortest_prompt)


def attention_weights(scores_nKRL: Tensor, bias_n11L: Tensor | None, options: AttentionOptions) -> Tensor:
    """Softmax in float32, with a cap on the scores before the bias and sinks beside them."""
    scores = scores_nKRL.float()
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if bias_n11L is not None:
        scores += bias_n11L
    if options.sinks_H is None:
        return scores.softmax(dim=-1)
    sinks = options.sinks_H.float().view(1, *scores.shape[1:3], 1).expand(scores.shape[0], -1, -1, -1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


class _RowLayout:
    """One new token of every active row, by whichever way `_attend` reads the cache."""

    def __init__(self, cache: KVCache, own_n: Tensor, longest: int) -> None:
        self.cache, self.longest = cache, longest
        self._cache, self._own_n = cache, own_n
        self._row_n = torch.arange(own_n.shape[0], device=own_n.device)

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, n, D): the active rows are the tokens of the stream."""
        pair_n2KD = torch.cat([key_1KTD, value_1KTD]).permute(2, 0, 1, 3)
        return self._attend(layer, query_1HTD[0].transpose(0, 1), pair_n2KD, options).transpose(0, 1)[None]

    def attend_heads(self, layer: int, heads_nXD: Tensor, queries: int, scaling: float) -> Tensor:
        """The same as (n, H, D), for plain attention of `queries` heads with the keys and values behind
        them."""
        pair_n2KD = heads_nXD[:, queries:].unflatten(1, (2, -1))
        return self._attend(layer, heads_nXD[:, :queries], pair_n2KD, AttentionOptions(scaling=scaling))

    def _attend(self, layer: int, query_nHD: Tensor, pair_n2KD: Tensor, options: AttentionOptions) -> Tensor:
        raise NotImplementedError


class DecodeLayout(_RowLayout):
    """One new token of every active row: attention over its prompt's slot and its own tokens.

    The queries of a slot's siblings are stacked, so that its keys are read once for all of them. `own_n`
    counts the tokens a row has in its own slot before this one.
    """

    def __init__(self, cache: KVCache, families: Families, own_n: Tensor, longest_own: int) -> None:
        super().__init__(cache, own_n, families.longest_prompt + longest_own + 1)
        self._families, self._longest = families, longest_own + 1
        self._bias: dict[int | None, Tensor] = {}

    def spans(self, positions_n: Tensor) -> Spans:
        """What each token sees: its prompt's slot and its own row."""
        slot_n = self._families.index_n // self._families.row_FM.shape[1]
        none = torch.zeros_like(slot_n)
        return Spans(slot_n, none, self._families.prompt_length_n, self._row_n, none, self._own_n + 1)

    def _attend(self, layer: int, query_nHD: Tensor, pair_n2KD: Tensor, options: AttentionOptions) -> Tensor:
        own = self._cache.own[layer]
        own[:, self._row_n, :, self._own_n] = pair_n2KD
        num_rows, width = query_nHD.shape[0], query_nHD.shape[2]
        query_nKRD = query_nHD.unflatten(1, (pair_n2KD.shape[2], -1)) * options.scaling
        repeats = query_nKRD.shape[2]

        row_FM = self._families.row_FM
        num_slots, fullest = row_FM.shape
        prefix_key, prefix_value = self._cache.prefix[layer][
            :, :num_slots, :, : self._families.longest_prompt
        ]
        stacked_FKXD = query_nKRD[row_FM].transpose(1, 2).flatten(2, 3)
        scores_FKXP = stacked_FKXD @ prefix_key.transpose(-1, -2)
        scores_nKRP = (
            scores_FKXP.unflatten(2, (fullest, repeats)).transpose(1, 2).flatten(0, 1)[self._families.index_n]
        )
        own_key, own_value = own[:, :num_rows, :, : self._longest]
        scores_nKRC = query_nKRD @ own_key.transpose(-1, -2)
        weights = self._softmax(torch.cat([scores_nKRP, scores_nKRC], dim=-1), options).to(own_value.dtype)
        prefix_nKRP, own_nKRC = weights.split([scores_nKRP.shape[-1], self._longest], dim=-1)
        weights_FKXP = prefix_nKRP[row_FM].transpose(1, 2).flatten(2, 3)
        out_FKXD = weights_FKXP @ prefix_value
        out_nKRD = (
            out_FKXD.unflatten(2, (fullest, repeats)).transpose(1, 2).flatten(0, 1)[self._families.index_n]
        )
        out_nKRD = out_nKRD + own_nKRC @ own_value
        return out_nKRD.reshape(num_rows, -1, width)

    def _softmax(self, scores_nKRL: Tensor, options: AttentionOptions) -> Tensor:
        return attention_weights(scores_nKRL, self._visibility(options.sliding_window), options)

    def _visibility(self, window: int | None) -> Tensor:
        """0 where a key may be seen and -inf elsewhere, (n, 1, 1, P + C); one per window width and step."""
        if window not in self._bias:
            device = self._own_n.device
            prompt_n1 = self._families.prompt_length_n[:, None]
            prefix_1P = torch.arange(self._families.longest_prompt, device=device)[None]
            own_1C = torch.arange(self._longest, device=device)[None]
            # Positions count from the start of the row's prompt; a padded prompt slot is no position at all.
            position_nL = torch.cat([prefix_1P.expand(len(prompt_n1), -1), prompt_n1 + own_1C], dim=1)
            now_n1 = prompt_n1 + self._own_n[:, None]
            visible_nL = torch.cat([prefix_1P < prompt_n1, own_1C <= self._own_n[:, None]], dim=1)
            if window is not None:
                visible_nL &= now_n1 - position_nL < window
            bias_nL = torch.zeros_like(visible_nL, dtype=torch.float32).masked_fill_(
                ~visible_nL, float("-inf")
            )
            self._bias[window] = bias_nL[:, None, None, :]
        return self._bias[window]


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The prompt lengths of the active rows of a flat cache, and the positions right behind them."""

    prompt_length_n: Tensor
    position_n: Tensor
    longest_prompt: int
    shortest_prompt: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step reads of it."""
        return self.prompt_length_n, self.position_n

    def at(self, tensors: Sequence[Tensor]) -> FlatRows:
        """The same with its tensors elsewhere."""
        length_n, position_n = tensors
        return FlatRows(length_n, position_n, self.longest_prompt, self.shortest_prompt)


class FlatLayout(_RowLayout):
    """One new token of every active row, whose slot begins with its prompt.

    Prompts end in one column, so rows that started together write and read the same columns. `own_n` counts
    the tokens a row has generated before this one; `longest_own` and `shortest_own` bound them.
    """

    def __init__(
        self, cache: KVCache, rows: FlatRows, own_n: Tensor, longest_own: int, shortest_own: int
    ) -> None:
        super().__init__(cache, own_n, rows.longest_prompt + longest_own + 1)
        self._rows = rows
        self._stop = cache.start + longest_own + 1
        self._first = cache.start - rows.longest_prompt
        self._is_even = longest_own == shortest_own
        self._is_full = self._is_even and rows.longest_prompt == rows.shortest_prompt
        self._bias: dict[int | None, Tensor | None] = {}
        self._head_bias: dict[int | None, Tensor] = {}

    def spans(self, positions_n: Tensor) -> Spans:
        """What each token sees: the prompt and its own tokens in its row."""
        none = torch.zeros_like(positions_n)
        first_n = self._cache.start - self._rows.prompt_length_n
        count_n = self._rows.prompt_length_n + self._own_n + 1
        return Spans(none, none, none, self._row_n, first_n, count_n)

    def _attend(self, layer: int, query_nHD: Tensor, pair_n2KD: Tensor, options: AttentionOptions) -> Tensor:
        num_rows, _, key_heads, width = pair_n2KD.shape
        own = self._cache.own[layer]
        if self._is_even:
            own[:, :num_rows, :, self._stop - 1] = pair_n2KD.transpose(0, 1)
        else:
            own[:, self._row_n, :, self._cache.start + self._own_n] = pair_n2KD
        # Rows and key heads as one axis: products over two would copy what they read.
        keys_XLD, values_XLD = own[:, :num_rows].flatten(1, 2)[:, :, self._first : self._stop]
        query_XRD = query_nHD.reshape(num_rows * key_heads, -1, width)
        if query_nHD.dtype == torch.float32 and options.softcap is None and options.sinks_H is None:
            bias_X1L = self._bias_of_heads(key_heads, options.sliding_window, query_nHD)
            scores_XRL = torch.baddbmm(bias_X1L, query_XRD, keys_XLD.transpose(1, 2), alpha=options.scaling)
            weights_XRL = scores_XRL.softmax(dim=-1)
        else:
            scores_XRL = torch.bmm(query_XRD * options.scaling, keys_XLD.transpose(1, 2))
            scores_nKRL = scores_XRL.unflatten(0, (num_rows, key_heads))
            weights = attention_weights(scores_nKRL, self._visibility(options.sliding_window), options)
            weights_XRL = weights.flatten(0, 1).to(values_XLD.dtype)
        return torch.bmm(weights_XRL, values_XLD).view(num_rows, -1, width)

    def _visibility(self, window: int | None) -> Tensor | None:
        """0 where a key may be seen and -inf elsewhere, (n, 1, 1, L); None where everything may."""
        if self._is_full and window is None:
            return None
        if window not in self._bias:
            column_1L = torch.arange(self._first, self._stop, device=self._own_n.device)[None]
            now_n1 = self._cache.start + self._own_n[:, None]
            prompt_n1 = self._cache.start - self._rows.prompt_length_n[:, None]
            visible_nL = (column_1L >= prompt_n1) & (column_1L <= now_n1)
            if window is not None:
                visible_nL &= now_n1 - column_1L < window
            bias_nL = torch.zeros_like(visible_nL, dtype=torch.float32)
            self._bias[window] = bias_nL.masked_fill_(~visible_nL, float("-inf"))[:, None, None, :]
        return self._bias[window]

    def _bias_of_heads(self, key_heads: int, window: int | None, like: Tensor) -> Tensor:
        """The same for rows and key heads as one axis, (n x K, 1, L), and zeros where everything may be
        seen."""
        if window not in self._head_bias:
            bias = self._visibility(window)
            self._head_bias[window] = (
                like.new_zeros(1, 1, 1) if bias is None else bias[:, 0].repeat_interleave(key_heads, dim=0)
            )
        return self._head_bias[window]
