"""What the native engine computes: prompts, and strides of the rows that grow from them, over a cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from covey.kernels.draws import Drawn
from covey.kernels.gpu.recordings import Compute, Recordings, recorded_columns, recorded_rows
from covey.kernels.protocol import Decoder, DrawInputs, Kernels, Sampler
from covey.media_positions import media_stream
from covey.models.attention import StreamLayout
from covey.models.policy import Policy
from covey.rollout.native.branches import Branches
from covey.rollout.native.cache import (
    DecodeLayout,
    Families,
    FlatLayout,
    FlatRows,
    KVCache,
    PrefillLayout,
)
from covey.rollout.native.extend import ExtendLayout
from covey.rollout.native.refill import Running, refill
from covey.rollout.native.rows import Family, Row, RowState
from covey.rollout.native.shape import CacheShape
from covey.rollout.noise import Ahead, sample, token_table
from covey.types import StreamSegment
from covey.types.arrays import ints

# Libraries prepare a kernel for each size of a product that they meet, which takes longer than a hundred
# products: tokens of a prefill, and rows from a number on, are filled up to multiples of these.
_PREFILL_STEP = 16
_ROW_STEP, _FEW_ROWS = 8, 32
# Tokens that a sampler decodes in one call at most, where nothing happens to a row: a signal waits so long.
_MOST_IN_A_CALL = 16


class Decoding:
    """Decodes the rows of `branches` by kernels, `stride` tokens of each at a time, over one cache at a time.

    `fullest` is the largest number of siblings of a prompt so far. `recordings` are None where none are made.
    """

    def __init__(
        self,
        policy: Policy,
        kernels: Kernels,
        branches: Branches,
        stride: int,
        recordings: Recordings | None,
    ) -> None:
        self._policy, self._kernels, self._branches = policy, kernels, branches
        self._num_tokens, self._recordings = stride, recordings
        self.cache: KVCache | None = None
        self.fullest = 1
        self._positions = 0
        self._addresses: tuple[object, ...] = ()
        self._last_hidden_FD: Tensor | None = None
        self._arrangement: Families | FlatRows | None = None
        self._state: RowState | None = None
        self._decoder: Decoder | None = None

    @cached_property
    def _table(self) -> Tensor:
        """Each token's share of the noise, (V,)."""
        return token_table(self._policy.vocab, self._policy.device)

    @property
    def _made_decoder(self) -> Decoder:
        assert self._decoder is not None
        return self._decoder

    def use(self, cache: KVCache, kept: Collection[int]) -> None:
        """Go on with this cache, by the weights as they are now; `kept` are the numbers of the caches that
        there are."""
        self.cache = cache
        # A decoder that is made anew takes the recordings of all caches with it.
        self._positions = max(self._positions, cache.shape.prompt + cache.shape.completion)
        self._decoder = self._kernels.decoder(self._policy, self._positions, self._decoder)
        self._forget_what_moved(kept)

    def end_rollout(self) -> None:
        """Let go of copies of weights that nothing reads until the next rollout: the update needs the
        memory."""
        is_kept = self._decoder is not None and self._decoder.is_compiled
        if self._recordings is None and not is_kept:
            self._decoder = None

    def rest(self) -> None:
        """Let go of the cache, the recordings and all else."""
        self.cache = self._last_hidden_FD = self._arrangement = self._state = self._decoder = None
        self._addresses = ()
        if self._recordings is not None:
            self._recordings.forget()

    def rows_changed(self) -> None:
        """Other rows decode from here on, or they lie elsewhere in the cache."""
        self._arrangement = None

    def grown(self, kept: Collection[int]) -> None:
        """Go on with the cache after it has grown, as `use` says."""
        assert self.cache is not None
        if self._last_hidden_FD is not None:
            former_FD = self._last_hidden_FD[:-1]
            self._last_hidden_FD = former_FD.new_zeros(self.cache.shape.slots + 1, former_FD.shape[1])
            self._last_hidden_FD[: len(former_FD)] = former_FD
        self.use(self.cache, kept)
        self.rows_changed()

    def prefill(self, families: Sequence[Family]) -> None:
        """Run prompts as one packed stream, and what is new of those that are begun as another; keep keys,
        values and the last hidden state of each."""
        assert self.cache is not None
        begun = [family for family in families if family.begun is not None]
        for family in begun:
            assert family.begun is not None
            family.begun.write(self.cache, family.slot, len(family.prompt))
        for part in ([family for family in families if family.begun is None], begun):
            if part:
                self._prefill(part)
        for family in begun:
            family.begun = None

    def _prefill(self, families: Sequence[Family]) -> None:
        """Run what is new of prompts, all of which are begun or none."""
        assert self.cache is not None
        device = self._policy.device
        begun = [f.num_begun for f in families]
        lengths = [len(f.prompt) - f.num_begun for f in families]
        total = sum(lengths)
        tokens, slots = [t for f in families for t in f.prompt[f.num_begun :]], [f.slot for f in families]
        if spare := -total % _PREFILL_STEP:
            lengths, slots, begun = [*lengths, spare], [*slots, self.cache.spare_slot], [*begun, 0]
        starts = [0, *accumulate(lengths)][:-1]
        length_s, begun_s = torch.tensor(lengths), torch.tensor(begun)
        number_T = torch.arange(total + spare) + (begun_s - torch.tensor(starts)).repeat_interleave(length_s)
        column_T = number_T
        if self.cache.shape.flat:
            column_T = number_T + self.cache.shape.prompt - (length_s + begun_s).repeat_interleave(length_s)
        slot_T = torch.tensor(slots).repeat_interleave(length_s)
        at = slot_T.to(device), column_T.to(device)
        layout: PrefillLayout | ExtendLayout
        if any(begun):
            parts = [(f.slot, len(f.prompt), f.num_begun) for f in families]
            layout = ExtendLayout(self.cache, parts, *at)
        else:
            segments = [StreamSegment(start=s, length=n) for s, n in zip(starts, lengths, strict=True)]
            layout = PrefillLayout(self.cache, StreamLayout(segments, device), *at)
        tokens_T = torch.tensor(tokens + [0] * spare, device=device)
        if any(family.media for family in families):
            row_T = torch.arange(len(lengths)).repeat_interleave(length_s)
            sequences = [*((ints(f.prompt), f.media) for f in families), (ints(()), ())]
            seen = media_stream(sequences, row_T.numpy(), number_T.numpy(), device)
            hidden_TD = self._policy.hidden(tokens_T, seen.positions_T, layout, seen.media)
        else:
            hidden_TD = self._made_decoder.hidden(tokens_T, number_T.to(device), layout)
        wanted = (self.cache.shape.slots + 1, hidden_TD.shape[1])
        if self._last_hidden_FD is None or self._last_hidden_FD.shape != wanted:
            self._last_hidden_FD = hidden_TD.new_zeros(wanted)
        last = torch.tensor(starts, device=device) + length_s.to(device) - 1
        self._last_hidden_FD[torch.tensor(slots, device=device)] = hidden_TD[last]

    def refill(self, families: Sequence[Family]) -> None:
        """Compute keys and values of these prompts, and of all rows, again by the weights as they are now."""
        assert self.cache is not None and self._last_hidden_FD is not None
        held: dict[int, list[tuple[int, Row]]] = {family.slot: [] for family in families}
        for number, branch in enumerate(self._branches.held):
            held[branch[0].family.slot].append((number, branch[0]))
        running = [Running(family, held[family.slot]) for family in families]
        for family, hidden_D in refill(self._policy, self.cache, running):
            self._last_hidden_FD[family.slot] = hidden_D

    def first_tokens(self, rows: Sequence[Row]) -> Drawn:
        """Draw the token behind each row's prompt, (n, 1)."""
        assert self._last_hidden_FD is not None
        device = self._last_hidden_FD.device
        slots = torch.tensor([row.family.slot for row in rows], device=device)
        return _stacked([self._draw(self._last_hidden_FD[slots], RowState.of(rows, device))])

    def start_rows(self, first: int, rows: Sequence[Row]) -> None:
        """Give these rows the cache's rows from number `first` on."""
        assert self.cache is not None
        slots = torch.tensor([row.family.slot for row in rows], device=self._policy.device)
        self.cache.start_rows(first, slots, max(len(row.family.prompt) for row in rows))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what rows of the cache hold to others, to which completions have moved."""
        assert self.cache is not None
        moved = [self._branches.held[target][0] for target in targets]
        longest = max(len(row.family.prompt) for row in moved), max(len(row.tokens) for row in moved)
        self._made_decoder.copy_rows(self.cache, sources, targets, self.cache.columns(*longest))

    def stride(self) -> Drawn:
        """Decode a stride of every row, and wait for nothing: k tokens for each, (n, k)."""
        rows = self._branches.rows
        own = [len(branch[0].tokens) - 1 for branch in self._branches.held]
        longest, shortest = max(own), min(own)
        if self._recordings is not None:
            return self._play(self._recordings, longest)
        if self._arrangement is None or self._state is None:
            self._arrangement = self._arrange(self._policy.device, self._spare(len(own)))
            self._state = self._state_of(rows)
        return self._stride_of(self._arrangement, self._state, longest, shortest)

    def _state_of(self, rows: Sequence[Row]) -> RowState:
        """What draws need to know of the rows, and which of them share what is computed."""
        device, held = self._policy.device, self._branches.held
        state = RowState.of(rows, device, self._spare(len(rows)))
        if len(held) < len(rows):
            sizes = [len(branch) for branch in held]
            leads = [0, *accumulate(sizes)][:-1]
            state.lead_b = torch.tensor(leads + [0] * self._spare(len(held)), device=device)
            shared = [number for number, size in enumerate(sizes) for _ in range(size)]
            state.shared_n = torch.tensor(shared + [0] * self._spare(len(rows)), device=device)
        return state

    def _stride_of(
        self, arrangement: Families | FlatRows, state: RowState, longest_own: int, shortest_own: int
    ) -> Drawn:
        """Decode k tokens of each row, (n, k)."""
        sampler = self._sampler_of(state)
        if sampler is not None:
            fed = self._fed(arrangement, state, longest_own, shortest_own)
            return self._until_something_happens(sampler, state, fed)
        drawn = []
        for i in range(self._num_tokens):
            fed = self._fed(arrangement, state, longest_own + i, shortest_own + i)
            drawn.append(self._draw(state.spread(self._made_decoder.hidden(*fed)), state))
        return _stacked(drawn)

    def _play(self, recordings: Recordings, longest_own: int) -> Drawn:
        """A stride by a recording: its sizes are a few, whatever the rows have."""
        assert self.cache is not None
        rows, device, shape = self._branches.rows, self._policy.device, self.cache.shape
        active = len(rows)
        spare = min(recorded_rows(active), shape.rows) - active
        if self._arrangement is None:
            self._arrangement = self._arrange(device, spare, shape)
        columns = min(recorded_columns(longest_own + self._num_tokens), shape.completion)
        state = RowState.of(rows, device, spare)
        arrangement, tensors = self._arrangement, self._arrangement.tensors

        def compute(*at: Tensor) -> Compute:
            def steps() -> Drawn:
                # As if one row were about to fill the columns and another were far behind.
                rows, state = arrangement.at(at[: len(tensors)]), RowState.recorded(at[len(tensors) :])
                return self._stride_of(rows, state, columns - self._num_tokens, -self._num_tokens)

            return steps

        size = (*(n for tensor in tensors for n in tensor.shape), columns, len(state.tensors))
        return recordings.play(self.cache.number, size, (*tensors, *state.tensors), compute)

    def _forget_what_moved(self, kept: Collection[int]) -> None:
        """Drop recordings of caches that are gone, and all where a weight lies elsewhere than before."""
        if self._recordings is None:
            return
        former, now = self._addresses, (self._decoder, *(p.data_ptr() for p in self._policy.parameters()))
        is_same = len(now) == len(former) and now[0] is former[0] and now[1:] == former[1:]
        self._recordings.forget(kept if is_same else ())
        self._addresses = now

    def _until_something_happens(
        self, sampler: Sampler, state: RowState, fed: tuple[Tensor, Tensor, DecodeLayout | FlatLayout]
    ) -> Drawn:
        """The same for as long as nothing happens to a row, up to the token at which something does."""
        most = min(_MOST_IN_A_CALL, *(row.num_left for row in self._branches.rows))
        drawn = sampler.decode(*fed, state.inputs(self._table), most)
        state.token_n, state.count_n = drawn.tokens[-1], state.count_n + len(drawn.tokens)
        return Drawn(*(part.transpose(0, 1) for part in drawn if part is not None))

    def _fed(
        self, arrangement: Families | FlatRows, state: RowState, longest_own: int, shortest_own: int
    ) -> tuple[Tensor, Tensor, DecodeLayout | FlatLayout]:
        """The newest tokens, their positions, and how they read the cache."""
        assert self.cache is not None
        token_b, count_b = state.fed
        own_b = count_b - 1
        layout: DecodeLayout | FlatLayout
        if isinstance(arrangement, FlatRows):
            layout = FlatLayout(self.cache, arrangement, own_b, longest_own, shortest_own)
        else:
            layout = DecodeLayout(self.cache, arrangement, own_b, longest_own)
        return token_b, arrangement.position_n + own_b, layout

    def _spare(self, active: int) -> int:
        """Rows that are computed beside so many active ones, so that few numbers of rows occur."""
        assert self.cache is not None
        if active <= _FEW_ROWS or self._made_decoder.is_compiled:
            return 0
        return min(-(-active // _ROW_STEP) * _ROW_STEP, self.cache.shape.rows) - active

    def _arrange(
        self, device: torch.device, spare: int, fixed: CacheShape | None = None
    ) -> Families | FlatRows:
        """How the rows read the cache; with `fixed` as large as this shape allows, whatever the rows need."""
        leads = [branch[0] for branch in self._branches.held]
        lengths = [len(row.family.prompt) for row in leads]
        positions = [row.family.next_position for row in leads]
        # A spare row sees what lies in its slot, and so has finite values.
        length_n = torch.tensor(lengths + lengths[:1] * spare, device=device)
        position_n = torch.tensor(positions + positions[:1] * spare, device=device)
        assert self.cache is not None
        longest, shortest = (fixed.prompt, 0) if fixed else (max(lengths), min(lengths))
        if self.cache.shape.flat:
            return FlatRows(length_n, position_n, longest, shortest)
        fullest = self.fullest if fixed else 0
        slots = [row.family.slot for row in leads]
        num_slots = fixed.slots if fixed else 0
        return Families.of(length_n, position_n, slots, longest, shortest, num_slots, fullest)

    def _sampler_of(self, state: RowState) -> Sampler | None:
        """Return the sampler that draws these rows in its own call; None where torch draws from logits."""
        return self._made_decoder.sampler if state.filters is None else None

    def _draw(self, hidden_nD: Tensor, state: RowState) -> Drawn:
        """Draw the next token of some rows, (n,), and move `state` on to it."""
        sampler = self._sampler_of(state)
        by = state.temperature_n, state.key_n, state.count_n, self._table
        if sampler is not None:
            drawn = sampler.draw(hidden_nD, DrawInputs(*by))
        else:
            if state.ahead is None:
                state.ahead = Ahead(state.key_n, state.count_n, self._table, self._num_tokens)
            drawn = sample(self._made_decoder.logits(hidden_nD), *by, state.ahead, state.filters)
        state.token_n, state.count_n = drawn.tokens, state.count_n + 1
        return drawn


def _stacked(drawn: Sequence[Drawn]) -> Drawn:
    """Join k draws of one token a row, (n,) each, into one of (n, k)."""
    return Drawn(*(torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True) if parts[0] is not None))
