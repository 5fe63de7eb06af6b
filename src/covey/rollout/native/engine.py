"""The native engine: continuous batching in this process, on the learner's own weights.

A prompt is prefilled once for all its siblings, and siblings are one row until they draw different tokens;
rows are refilled as they end; the cache is allocated once; sampled logprobs are kept. The engine calls the
very modules that the optimizer updates, or a decoder that its kernels make of their weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from tokenizers import Tokenizer

from covey.kernels.draws import Drawn
from covey.kernels.protocol import Kernels
from covey.models.policy import Policy
from covey.rollout.engine import NO_MEMBERS, Capabilities, NamedWeights, nothing, refuse_unfit
from covey.rollout.filters import kept_sets
from covey.rollout.native.branches import Branches
from covey.rollout.native.cache import KVCache
from covey.rollout.native.caches import Caches, free_bytes
from covey.rollout.native.decoding import Decoding
from covey.rollout.native.kept import Copied, KeptRow, KeptRows
from covey.rollout.native.rows import Family, Row
from covey.rollout.noise import row_key
from covey.rollout.stop_strings import check_stop_strings, search_for
from covey.texts import tr
from covey.types import Completion, Finding, Finish, GenerationRequest, Medium, Receipt
from covey.types.arrays import floats, ints

# Tokens of one prefill pass; bounds its activations.
_PREFILL_TOKENS = 16384


class NativeEngine:
    """Samples from `policy` by its kernels, or by others. `max_rows` bounds how many completions decode side
    by side. `stride` is how many tokens each of them gets before the host reads which have ended; None is
    what suits the kernels. `is_compiled` says whether decoding steps run in C. Cache and recordings last
    until the next rollout; where `rests`, `rest` lets them go. `on_turn` is called between two strides, and
    may submit, abort and publish. `tokenizer` finds the stop strings of requests.

    Requests may come at any time. Rows of requests that may go on are kept when they end, until they are
    extended, the next `publish` or `rest`, or until memory is short (`KeptRows`).
    """

    capabilities = Capabilities(logprobs=True, noise_keys=True, swaps=True)
    members = NO_MEMBERS

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 256,
        stride: int | None = None,
        kernels: Kernels | None = None,
        rests: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._policy, self._rests, self._tokenizer = policy, rests, tokenizer
        self.on_turn: Callable[[], None] = nothing
        self._kernels = kernels or policy.kernels
        stride = stride or self._kernels.stride
        self._caches = Caches(policy, max_rows, stride)
        self._recordings = self._kernels.recordings()
        self._branches = Branches(may_share=stride == 1 and self._recordings is None)
        self._decoding = Decoding(policy, self._kernels, self._branches, stride, self._recordings)
        self.is_compiled = policy.stream != "padded" and self._kernels.compiles(policy)
        self._version = 0
        self._next_id = 0
        self._requests: dict[int, GenerationRequest] = {}
        self._prompts: dict[tuple[tuple[int, ...], tuple[Medium, ...]], deque[int]] = {}
        self._later: list[int] = []
        self._has_new = False
        # Whether decoder and prompts are of former weights.
        self._is_behind = False
        self._kept = KeptRows(lambda: free_bytes(policy.device))
        self._families: list[Family] = []
        self._aborted: list[Completion] = []
        # What a server says of its progress.
        self.num_computed = 0

    @property
    def _cache(self) -> KVCache | None:
        return self._decoding.cache

    @property
    def _rows(self) -> list[Row]:
        return self._branches.rows

    @property
    def given_up(self) -> str:
        """What the engine goes on without, and why; empty where nothing failed."""
        failure = self._recordings.failure if self._recordings is not None else ""
        return failure and tr(
            "decoding continues without CUDA graphs, because one failed: {failure}", failure=failure
        )

    # -- protocol

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request behind the others of its prompt, or behind all where the cache is too small."""
        refuse_unfit(request, self._policy.head.banned)
        check_stop_strings(request, self._tokenizer)
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
        queue = self._prompts.setdefault(self._requests[number].prefix, deque())
        queue.append(number)
        if self._is_running and self._cache is not None:
            siblings = min(self._cache.shape.rows, len(queue))
            self._decoding.fullest = max(self._decoding.fullest, siblings)

    @property
    def _is_running(self) -> bool:
        """Whether the cache is in use."""
        return bool(self._families or self._branches.held)

    def results(self) -> Iterator[Completion]:
        """Decode until every request has ended, giving completions as they end."""
        if self._policy.stream == "padded":
            raise ValueError(
                tr(
                    "the native engine needs a policy that computes packed rows; this one computes "
                    "padded rows"
                )
            )
        if self._cache is not None and self._is_running:
            # What a generator that was left alone has begun.
            self._decoding.use(self._cache, self._caches.numbers)
        self._fit_cache()
        while True:
            self.on_turn()
            yield from self._aborted
            self._aborted.clear()
            if self._has_new or self._later:
                self._fit_cache()
            if not (self._prompts or self._branches.held or self._families):
                self._decoding.end_rollout()
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
                self._aborted.append(Completion.aborted(number))
        self._prompts = {p: q for p, q in self._prompts.items() if q}
        self._families = [f for f in self._families if f.running or f.waiting]

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Count a new version; the weights are the learner's own, so there is nothing to send. Rows that run
        go on by them: their keys and values are computed again, and no row is kept."""
        self._version = version
        self._is_behind = True
        self._kept.clear()
        return Receipt(version=version)

    def held_base(self) -> str:
        """It samples from the learner's own weights."""
        return ""

    def rest(self) -> None:
        """Keep no row, and let go of the cache and the recordings where that was asked for. Nothing may be
        queued."""
        self._kept.clear()
        if not self._rests or self._requests:
            return
        self._caches.clear()
        self._decoding.rest()

    def take_notices(self) -> list[Finding]:
        """Nothing happens to it."""
        return []

    def close(self) -> None:
        """It holds no process and no connection."""

    # -- one turn

    @torch.inference_mode()
    def _advance(self) -> list[Completion]:
        """Admit what fits, then decode a stride of every row; returns what ended."""
        if self._is_behind:
            self._follow_weights()
        done = self._admit()
        if self._branches.held:
            done += self._decode()
        return done

    def _follow_weights(self) -> None:
        """Go on by the weights as they are now."""
        assert self._cache is not None
        self._is_behind = False
        self._decoding.use(self._cache, self._caches.numbers)
        if self._families:
            self._decoding.refill(self._families)
            self.num_computed += sum(len(family.prompt) for family in self._families)
            self.num_computed += sum(len(branch[0].tokens) - 1 for branch in self._branches.held)
        for family in self._families:
            family.copied = None

    @torch.inference_mode()
    def _fit_cache(self) -> None:
        """Make cache and decoder for all that is queued, but for what has to wait for the rows that run."""
        has_new, self._has_new = self._has_new, False
        cache = self._cache
        if self._is_running:
            assert cache is not None
            later = [self._requests[number] for number in self._later]
            if has_new and later and self._caches.grow(cache, later):
                self._decoding.grown(self._caches.numbers)
                for number in self._later:
                    self._queue(number)
                self._later.clear()
        else:
            for number in self._later:
                self._queue(number)
            self._later.clear()
            if self._requests:
                cache = self._caches.for_requests(self._requests.values(), len(self._prompts))
                sizes = (min(cache.shape.rows, len(queue)) for queue in self._prompts.values())
                self._decoding.fullest = max([self._decoding.fullest, *sizes])
            if cache is not None:
                self._decoding.use(cache, self._caches.numbers)
                self._is_behind = False

    def _admit(self) -> list[Completion]:
        """Prefill prompts into free slots and start their siblings on free rows."""
        assert self._cache is not None
        fresh = self._claim_slots()
        if fresh:
            self.num_computed += sum(len(family.prompt) - family.num_begun for family in fresh)
            self._decoding.prefill(fresh)
        started: list[Row] = []
        room = self._cache.shape.rows - len(self._rows)
        for family in self._families:
            while family.waiting and len(started) < room:
                number = family.waiting.popleft()
                request = self._requests[number]
                search = search_for(request, self._tokenizer)
                key, now = row_key(request.turn), time.perf_counter()
                started.append(Row(number, request, family, key, now, search))
                family.running += 1
        if not started:
            return []
        done = self._take(started, self._decoding.first_tokens(started))
        first = len(self._branches.held)
        leads = self._branches.start([row for row in started if not row.has_ended])
        if leads:
            self._decoding.start_rows(first, leads)
        self._families = [f for f in self._families if f.running or f.waiting]
        self._decoding.rows_changed()
        return done

    def _claim_slots(self) -> list[Family]:
        assert self._cache is not None
        taken = {f.slot for f in self._families}
        free = [s for s in range(self._cache.shape.slots) if s not in taken]
        waiting = sum(len(f.waiting) for f in self._families)
        room = self._cache.shape.rows - len(self._rows) - waiting
        fresh: list[Family] = []
        tokens = 0
        for prefix in list(self._prompts):
            prompt, media = prefix
            # A prompt is admitted once a row is free for it, so that slots do not fill with idle prompts.
            if not free or room <= 0 or (fresh and tokens + len(prompt) > _PREFILL_TOKENS):
                break
            family = Family(free.pop(0), prompt, self._prompts.pop(prefix), media=media)
            family.begun = self._kept.take([self._requests[number] for number in family.waiting])
            fresh.append(family)
            room -= len(family.waiting)
            tokens += len(prompt) - family.num_begun
        self._families += fresh
        return fresh

    def _decode(self) -> list[Completion]:
        """Decode a stride of every row; returns what ended with it."""
        rows, num_held = self._rows, len(self._branches.held)
        done = self._take(rows, self._decoding.stride())
        if done or num_held < len(rows):
            self._follow(has_ended=bool(done))
        return done

    def _take(self, rows: Sequence[Row], drawn: Drawn) -> list[Completion]:
        """Give `rows` the tokens that were drawn for them; returns what has ended with them."""
        self.num_computed += len(rows) * drawn.tokens.shape[1]
        tokens_nk, logprobs_nk = drawn.tokens[: len(rows)].tolist(), drawn.logprobs[: len(rows)].tolist()
        kept_n = kept_sets([row.request.sampling for row in rows], drawn.kept, self._policy.vocab)
        done = []
        for row, tokens, logprobs, kept in zip(rows, tokens_nk, logprobs_nk, kept_n, strict=True):
            finish = row.take(tokens, logprobs, self._version, kept)
            if finish is not None:
                done.append(self._completion(row, finish))
        return done

    # -- bookkeeping

    def _keep(self, row: Row) -> None:
        """Keep keys and values of a row that has ended; it lies where it was decoded."""
        assert self._cache is not None
        family, fed = row.family, len(row.tokens) - 1
        if family.copied is None:
            family.copied = Copied.of_prompt(self._cache, family.slot, len(family.prompt))
        parts = [family.copied]
        for number, branch in enumerate(self._branches.held):
            if any(one is row for one in branch):
                parts.append(Copied.of_row(self._cache, number, fed))
        tokens = *family.prompt, *row.tokens
        self._kept.keep(row.request.turn, KeptRow(tokens, family.media, parts))

    def _completion(self, row: Row, finish: Finish) -> Completion:
        self._requests.pop(row.id)
        if row.request.may_go_on and finish is not Finish.ABORT:
            self._keep(row)
        row.has_ended = True
        row.family.running -= 1
        return Completion(
            request_id=row.id,
            token_ids=ints(row.tokens),
            logprobs=floats(row.logprobs),
            versions=row.versions,
            finish=finish,
            seconds=time.perf_counter() - row.started,
            kept=row.kept,
        )

    def _follow(self, *, has_ended: bool) -> None:
        """Let the rows of the cache follow the newest tokens, and go on without what has ended."""
        sources, targets = self._branches.part()
        if sources:
            self._decoding.move_rows(sources, targets)
        if has_ended:
            self._families = [f for f in self._families if f.running or f.waiting]
        if sources or has_ended:
            self._decoding.rows_changed()
