"""The native engine: continuous batching in this process, on the learner's own weights.

A prompt is prefilled once for all its siblings, and siblings are one row until they draw different tokens;
rows are refilled as they end; the cache is allocated once; sampled logprobs are kept. The engine calls the
very modules that the optimizer updates, or a decoder that its kernels make of their weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from covey.kernels.gpu.recordings import Compute, Recordings, recorded_columns, recorded_rows
from covey.kernels.protocol import Decoder, DrawInputs, Kernels, Sampler
from covey.models.attention import StreamLayout
from covey.models.policy import Policy
from covey.rollout.engine import Capabilities, NamedWeights
from covey.rollout.native.branches import Branches
from covey.rollout.native.cache import (
    DecodeLayout,
    Families,
    FlatLayout,
    FlatRows,
    KVCache,
    PrefillLayout,
)
from covey.rollout.native.caches import Caches
from covey.rollout.native.rows import Family, Row, RowState, refuse_empty
from covey.rollout.native.shape import CacheShape
from covey.rollout.noise import Ahead, row_key, sample, token_table
from covey.types import Completion, Finish, GenerationRequest, Receipt, StreamSegment

# Tokens of one prefill pass; bounds its activations.
_PREFILL_TOKENS = 16384
# Libraries prepare a kernel for each size of a product that they meet, which takes longer than a hundred
# products: tokens of a prefill, and rows from a number on, are filled up to multiples of these.
_PREFILL_STEP = 16
_ROW_STEP, _FEW_ROWS = 8, 32
# Tokens that a sampler decodes in one call at most, where nothing happens to a row: a signal waits so long.
_MOST_IN_A_CALL = 16


class NativeEngine:
    """Samples from `policy` by its kernels, or by others. `max_rows` bounds how many completions decode side
    by side. `stride` is how many tokens each of them gets before the host reads which have ended; None is
    what suits the kernels. Cache and recordings last until the next rollout; where `rests`, `rest` lets them
    go."""

    capabilities = Capabilities(logprobs=True, noise_keys=True)

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 256,
        stride: int | None = None,
        kernels: Kernels | None = None,
        rests: bool = False,
    ) -> None:
        self._policy, self._rests = policy, rests
        self._kernels = kernels or policy.kernels
        self._stride = stride or self._kernels.stride
        self._caches = Caches(policy, max_rows, self._stride)
        self._recordings = self._kernels.recordings()
        self._branches = Branches(may_share=self._stride == 1 and self._recordings is None)
        self._addresses: tuple[object, ...] = ()
        self._fullest, self._positions = 1, 0
        self._version = 0
        self._next_id = 0
        self._requests: dict[int, GenerationRequest] = {}
        self._prompts: dict[tuple[int, ...], deque[int]] = {}
        self._later: list[int] = []
        self._has_new = False
        self._families: list[Family] = []
        self._aborted: list[Completion] = []
        self._cache: KVCache | None = None
        self._last_hidden_FD: Tensor | None = None
        self._arrangement: Families | FlatRows | None = None
        self._state: RowState | None = None
        self._decoder: Decoder | None = None

    @cached_property
    def _table(self) -> Tensor:
        """Each token's share of the noise, (V,)."""
        return token_table(self._policy.vocab, self._policy.device)

    @property
    def _rows(self) -> list[Row]:
        return self._branches.rows

    @property
    def _made_decoder(self) -> Decoder:
        assert self._decoder is not None
        return self._decoder

    @property
    def is_compiled(self) -> bool:
        """Whether decoding steps run in C."""
        return self._kernels.is_compiled and self._kernels.decoder(self._policy, 1).is_compiled

    @property
    def given_up(self) -> str:
        """What the engine goes on without, and why; empty where nothing failed."""
        failure = self._recordings.failure if self._recordings is not None else ""
        return failure and f"decoding goes on without CUDA graphs, since one failed: {failure}"

    # -- protocol

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request behind the others of its prompt, or behind all where the cache is too small."""
        refuse_empty(request)
        number = self._next_id
        self._next_id += 1
        self._requests[number] = request
        self._has_new = True
        if self._is_running and self._cache is not None and not self._caches.fits(self._cache, request):
            self._later.append(number)
        else:
            self._queue(number)
        return number

    def _queue(self, number: int) -> None:
        queue = self._prompts.setdefault(self._requests[number].prompt_token_ids, deque())
        queue.append(number)
        if self._is_running and self._cache is not None:
            self._fullest = max(self._fullest, min(self._cache.shape.rows, len(queue)))

    @property
    def _is_running(self) -> bool:
        """Whether the cache is in use."""
        return bool(self._families or self._branches.held)

    def results(self) -> Iterator[Completion]:
        """Decode until every request has ended, giving completions as they end."""
        if self._policy.stream == "padded":
            raise ValueError(
                "the native engine needs a policy that runs as a stream; this one is on padded rows"
            )
        self._make_room()
        while True:
            yield from self._aborted
            self._aborted.clear()
            if (self._has_new or self._later) and not self._is_running:
                self._make_room()
            if not (self._prompts or self._branches.held or self._families):
                is_kept = self._decoder is not None and self._decoder.is_compiled
                if self._recordings is None and not is_kept:
                    # Nothing reads the copies of weights until the next rollout, and the update needs room.
                    self._decoder = None
                return
            yield from self._advance()

    @torch.inference_mode()
    def abort(self, ids: Sequence[int]) -> None:
        """End requests now; running ones keep what they have sampled."""
        wanted = set(ids)
        for row in [r for r in self._rows if r.id in wanted]:
            self._aborted.append(self._completion(row, Finish.ABORT))
        self._follow(has_ended=True)
        queues = [*self._prompts.values(), *(f.waiting for f in self._families), self._later]
        for queue in queues:
            for number in [n for n in queue if n in wanted]:
                queue.remove(number)
                self._requests.pop(number)
                self._aborted.append(
                    Completion(
                        request_id=number,
                        token_ids=(),
                        logprobs=(),
                        versions=(),
                        finish=Finish.ABORT,
                        seconds=0.0,
                    )
                )
        self._prompts = {p: q for p, q in self._prompts.items() if q}
        self._families = [f for f in self._families if f.running or f.waiting]

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Count a new version; the weights are the learner's own, so there is nothing to send."""
        self._version = version
        return Receipt(version=version)

    def rest(self) -> None:
        """Let go of the cache and the recordings where that was asked for. Nothing may be queued."""
        if not self._rests or self._requests:
            return
        self._caches.clear()
        self._cache = self._last_hidden_FD = self._arrangement = self._state = self._decoder = None
        self._addresses = ()
        if self._recordings is not None:
            self._recordings.forget()

    # -- one turn

    @torch.inference_mode()
    def _advance(self) -> list[Completion]:
        """Admit what fits, then decode a stride of every row; returns what ended."""
        done = self._admit()
        if self._branches.held:
            done += self._decode()
        return done

    def _make_room(self) -> None:
        """Make cache and step for all that is queued, but for what has to wait for the rows that run."""
        self._has_new = False
        if not self._is_running:
            for number in self._later:
                self._queue(number)
            self._later.clear()
            if self._requests:
                self._cache = self._caches.for_requests(self._requests.values(), len(self._prompts))
                sizes = (min(self._cache.shape.rows, len(queue)) for queue in self._prompts.values())
                self._fullest = max([self._fullest, *sizes])
        if self._cache is not None:
            shape = self._cache.shape
            # A decoder that is made anew takes the recordings of all caches with it.
            self._positions = max(self._positions, shape.prompt + shape.completion)
            self._decoder = self._kernels.decoder(self._policy, self._positions, self._decoder)
            self._forget_what_moved()

    def _admit(self) -> list[Completion]:
        """Prefill prompts into free slots and start their siblings on free rows."""
        assert self._cache is not None
        fresh = self._claim_slots()
        if fresh:
            self._prefill(fresh)
        started: list[Row] = []
        room = self._cache.shape.rows - len(self._rows)
        for family in self._families:
            while family.waiting and len(started) < room:
                number = family.waiting.popleft()
                request = self._requests[number]
                started.append(Row(number, request, family, row_key(request.noise_key), time.perf_counter()))
                family.running += 1
        if not started:
            return []
        assert self._last_hidden_FD is not None
        device = self._last_hidden_FD.device
        slots = torch.tensor([row.family.slot for row in started], device=device)
        token_n, logprob_n = self._draw(self._last_hidden_FD[slots], RowState.of(started, device))
        done = self._take(started, token_n[:, None], logprob_n[:, None])
        first = len(self._branches.held)
        leads = self._branches.start([row for row in started if not row.has_ended])
        if leads:
            slots = torch.tensor([row.family.slot for row in leads], device=device)
            self._cache.start_rows(first, slots, max(len(row.family.prompt) for row in leads))
        self._families = [f for f in self._families if f.running or f.waiting]
        self._arrangement = None
        return done

    def _claim_slots(self) -> list[Family]:
        assert self._cache is not None
        taken = {f.slot for f in self._families}
        free = [s for s in range(self._cache.shape.slots) if s not in taken]
        waiting = sum(len(f.waiting) for f in self._families)
        room = self._cache.shape.rows - len(self._rows) - waiting
        fresh: list[Family] = []
        tokens = 0
        for prompt in list(self._prompts):
            # A prompt is admitted once a row is free for it, so that slots do not fill with idle prompts.
            if not free or room <= 0 or (fresh and tokens + len(prompt) > _PREFILL_TOKENS):
                break
            family = Family(free.pop(0), prompt, self._prompts.pop(prompt))
            fresh.append(family)
            room -= len(family.waiting)
            tokens += len(prompt)
        self._families += fresh
        return fresh

    def _prefill(self, families: Sequence[Family]) -> None:
        """Run whole prompts as one packed stream; keep keys, values and the last hidden state of each."""
        assert self._cache is not None
        device = self._policy.device
        lengths = [len(f.prompt) for f in families]
        total = sum(lengths)
        tokens, slots = [t for f in families for t in f.prompt], [f.slot for f in families]
        if spare := -total % _PREFILL_STEP:
            lengths, slots = [*lengths, spare], [*slots, self._cache.spare_slot]
        starts = [0, *accumulate(lengths)][:-1]
        segments = [StreamSegment(start=s, length=n) for s, n in zip(starts, lengths, strict=True)]
        length_s = torch.tensor(lengths)
        position_T = torch.arange(total + spare) - torch.tensor(starts).repeat_interleave(length_s)
        column_T = position_T
        if self._cache.shape.flat:
            column_T = position_T + self._cache.shape.prompt - length_s.repeat_interleave(length_s)
        slot_T = torch.tensor(slots).repeat_interleave(length_s)
        layout = PrefillLayout(
            self._cache, StreamLayout(segments, device), slot_T.to(device), column_T.to(device)
        )
        tokens_T = torch.tensor(tokens + [0] * spare, device=device)
        hidden_TD = self._made_decoder.hidden(tokens_T, position_T.to(device), layout)
        wanted = (self._cache.shape.slots + 1, hidden_TD.shape[1])
        if self._last_hidden_FD is None or self._last_hidden_FD.shape != wanted:
            self._last_hidden_FD = hidden_TD.new_zeros(wanted)
        last = torch.tensor(starts, device=device) + length_s.to(device) - 1
        self._last_hidden_FD[torch.tensor(slots, device=device)] = hidden_TD[last]

    def _decode(self) -> list[Completion]:
        """Decode a stride of every row; nothing of it waits for the host."""
        rows = self._rows
        own = [len(branch[0].tokens) - 1 for branch in self._branches.held]
        longest, shortest = max(own), min(own)
        if self._recordings is not None:
            drawn = self._play(self._recordings, longest)
        else:
            if self._arrangement is None or self._state is None:
                self._arrangement = self._arrange(self._policy.device, self._spare(len(own)))
                self._state = self._state_of(rows)
            drawn = self._stride_of(self._arrangement, self._state, longest, shortest)
        done = self._take(rows, *drawn)
        if done or len(own) < len(rows):
            self._follow(has_ended=bool(done))
        return done

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
    ) -> tuple[Tensor, Tensor]:
        """Tokens and logprobs, (n, k) each."""
        sampler = self._made_decoder.sampler
        if sampler is not None:
            fed = self._fed(arrangement, state, longest_own, shortest_own)
            return self._until_something_happens(sampler, state, fed)
        drawn = []
        for i in range(self._stride):
            fed = self._fed(arrangement, state, longest_own + i, shortest_own + i)
            drawn.append(self._draw(state.spread(self._made_decoder.hidden(*fed)), state))
        tokens_nk, logprobs_nk = (torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True))
        return tokens_nk, logprobs_nk

    def _play(self, recordings: Recordings, longest_own: int) -> tuple[Tensor, Tensor]:
        """A stride by a recording: its sizes are a few, whatever the rows have."""
        assert self._cache is not None
        rows, device, shape = self._rows, self._policy.device, self._cache.shape
        active = len(rows)
        spare = min(recorded_rows(active), shape.rows) - active
        if self._arrangement is None:
            self._arrangement = self._arrange(device, spare, shape)
        columns = min(recorded_columns(longest_own + self._stride), shape.completion)
        state = RowState.of(rows, device, spare)
        arrangement, tensors = self._arrangement, self._arrangement.tensors

        def compute(*at: Tensor) -> Compute:
            def steps() -> tuple[Tensor, Tensor]:
                # As if one row were about to fill the columns and another were far behind.
                rows, given = arrangement.at(at[: len(tensors)]), at[len(tensors) :]
                state = RowState(given[0], given[1], given[2], given[3])
                return self._stride_of(rows, state, columns - self._stride, -self._stride)

            return steps

        size = (*(n for tensor in tensors for n in tensor.shape), columns)
        return recordings.play(self._cache.number, size, (*tensors, *state.tensors), compute)

    def _forget_what_moved(self) -> None:
        """Drop recordings of caches that are gone, and all where a weight lies elsewhere than before."""
        if self._recordings is None:
            return
        former, now = self._addresses, (self._decoder, *(p.data_ptr() for p in self._policy.parameters()))
        is_same = len(now) == len(former) and now[0] is former[0] and now[1:] == former[1:]
        self._recordings.forget(self._caches.numbers if is_same else ())
        self._addresses = now

    def _until_something_happens(
        self, sampler: Sampler, state: RowState, fed: tuple[Tensor, Tensor, DecodeLayout | FlatLayout]
    ) -> tuple[Tensor, Tensor]:
        """The same for as long as nothing happens to a row, up to the token at which something does."""
        most = min(_MOST_IN_A_CALL, *(row.num_left for row in self._rows))
        token_kn, logprob_kn = sampler.decode(*fed, state.inputs(self._table), most)
        state.token_n, state.count_n = token_kn[-1], state.count_n + len(token_kn)
        return token_kn.t(), logprob_kn.t()

    def _fed(
        self, arrangement: Families | FlatRows, state: RowState, longest_own: int, shortest_own: int
    ) -> tuple[Tensor, Tensor, DecodeLayout | FlatLayout]:
        """The newest tokens, their positions, and how they read the cache."""
        assert self._cache is not None
        token_b, count_b = state.fed
        own_b = count_b - 1
        layout: DecodeLayout | FlatLayout
        if isinstance(arrangement, FlatRows):
            layout = FlatLayout(self._cache, arrangement, own_b, longest_own, shortest_own)
        else:
            layout = DecodeLayout(self._cache, arrangement, own_b, longest_own)
        return token_b, arrangement.prompt_length_n + own_b, layout

    def _spare(self, active: int) -> int:
        """Rows that are computed beside so many active ones, so that few numbers of rows occur."""
        assert self._cache is not None
        if active <= _FEW_ROWS or self._made_decoder.is_compiled:
            return 0
        return min(-(-active // _ROW_STEP) * _ROW_STEP, self._cache.shape.rows) - active

    def _arrange(
        self, device: torch.device, spare: int, fixed: CacheShape | None = None
    ) -> Families | FlatRows:
        """How the rows read the cache; with `fixed` as large as this shape allows, whatever the rows need."""
        leads = [branch[0] for branch in self._branches.held]
        lengths = [len(row.family.prompt) for row in leads]
        # A spare row sees what lies in its slot, and so has finite values.
        length_n = torch.tensor(lengths + lengths[:1] * spare, device=device)
        assert self._cache is not None
        longest, shortest = (fixed.prompt, 0) if fixed else (max(lengths), min(lengths))
        if self._cache.shape.flat:
            return FlatRows(length_n, longest, shortest)
        fullest = self._fullest if fixed else 0
        slots = [row.family.slot for row in leads]
        return Families.of(length_n, slots, longest, shortest, fixed.slots if fixed else 0, fullest)

    def _draw(self, hidden_nD: Tensor, state: RowState) -> tuple[Tensor, Tensor]:
        """The next token of some rows and its logprob, (n,) each; `state` goes on to it."""
        sampler = self._made_decoder.sampler
        by = state.temperature_n, state.key_n, state.count_n, self._table
        if sampler is not None:
            token_n, logprob_n = sampler.draw(hidden_nD, DrawInputs(*by))
        else:
            if state.ahead is None:
                state.ahead = Ahead(state.key_n, state.count_n, self._table, self._stride)
            token_n, logprob_n = sample(self._made_decoder.logits(hidden_nD), *by, state.ahead)
        state.token_n, state.count_n = token_n, state.count_n + 1
        return token_n, logprob_n

    def _take(self, rows: Sequence[Row], tokens_nk: Tensor, logprobs_nk: Tensor) -> list[Completion]:
        """Give `rows` the tokens that were drawn for them; returns what has ended with them."""
        all_tokens, all_logprobs = tokens_nk[: len(rows)].tolist(), logprobs_nk[: len(rows)].tolist()
        done = []
        for row, tokens, logprobs in zip(rows, all_tokens, all_logprobs, strict=True):
            finish = row.take(tokens, logprobs)
            if finish is not None:
                done.append(self._completion(row, finish))
        return done

    # -- bookkeeping

    def _completion(self, row: Row, finish: Finish) -> Completion:
        self._requests.pop(row.id)
        row.has_ended = True
        row.family.running -= 1
        return Completion(
            request_id=row.id,
            token_ids=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            versions=(self._version,) * len(row.tokens),
            finish=finish,
            seconds=time.perf_counter() - row.started,
        )

    def _follow(self, *, has_ended: bool) -> None:
        """Let the rows of the cache follow the newest tokens, and go on without what has ended."""
        sources, targets = self._branches.part()
        if sources:
            assert self._cache is not None
            moved = [self._branches.held[target][0] for target in targets]
            longest = max(len(row.family.prompt) for row in moved), max(len(row.tokens) for row in moved)
            columns = self._cache.columns(*longest)
            self._made_decoder.copy_rows(self._cache, sources, targets, columns)
        if has_ended:
            self._families = [f for f in self._families if f.running or f.waiting]
        if sources or has_ended:
            self._arrangement = None
