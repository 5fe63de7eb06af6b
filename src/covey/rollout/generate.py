"""The fallback engine: transformers' `generate` with covey's noise, for models the native engine cannot
serve.

It is also the oracle of the native engine's tests: the same noise keys, another implementation. Requests of
one prompt length run together, so nothing is padded on the left and recurrent layers see exactly their own
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from covey.models.policy import Policy
from covey.rollout.engine import NO_MEMBERS, Capabilities, NamedWeights, nothing, refuse_unfit
from covey.rollout.filters import filters_of, kept_sets
from covey.rollout.noise import row_key, sample, token_table
from covey.rollout.stop_strings import check_stop_strings, num_until_stop, search_for
from covey.types import Completion, Finding, Finish, GenerationRequest, KeptSets, Receipt
from covey.types.arrays import floats, ints


class _Sampler(LogitsProcessor):
    """Turns each step's logits into a one-hot of the token that covey's noise draws, and keeps what was drawn
    and the sets that filters left. `count` is called with the number of tokens of each step."""

    def __init__(
        self, requests: Sequence[GenerationRequest], device: torch.device, count: Callable[[int], None]
    ) -> None:
        self._count = count
        self._keys_R = torch.tensor([row_key(r.turn) for r in requests], device=device)
        self._temperature_R = torch.tensor([r.sampling.temperature for r in requests], device=device)
        self._sampling = [r.sampling for r in requests]
        self._banned = list(requests[0].sampling.banned_token_ids)
        self._filters = filters_of(self._sampling, device)
        self._table_V: Tensor | None = None
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        # One list for each token, of a set for each row.
        self.kept: list[list[KeptSets | None]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._table_V is None:
            self._table_V = token_table(scores.shape[1], scores.device)
        position_R = torch.full_like(self._keys_R, len(self.tokens))
        by = self._temperature_R, self._keys_R, position_R, self._table_V
        if self._banned:
            scores[:, self._banned] = float("-inf")
        drawn = sample(scores, *by, filters=self._filters)
        self.tokens.append(drawn.tokens)
        self.logprobs.append(drawn.logprobs)
        kept_R1W = None if drawn.kept is None else drawn.kept[:, None]
        self.kept.append(kept_sets(self._sampling, kept_R1W, scores.shape[1]))
        self._count(len(drawn.tokens))
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)


class _AtStopStrings(StoppingCriteria):
    """Ends each row with the token that completes one of its stop strings."""

    def __init__(self, requests: Sequence[GenerationRequest], tokenizer: Tokenizer | None) -> None:
        self._searches = [search_for(request, tokenizer) for request in requests]

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        ended = [s is not None and s.ends_with(t) for s, t in zip(self._searches, tokens, strict=True)]
        return torch.tensor(ended, device=input_ids.device)


class GenerateEngine:
    """Samples with `model.generate`, at most `max_rows` completions at a time; `on_turn` is called before
    each batch, and may submit and abort. `tokenizer` finds the stop strings of requests."""

    capabilities = Capabilities(logprobs=True, noise_keys=True, swaps=True)
    given_up = ""
    members = NO_MEMBERS

    def __init__(self, policy: Policy, *, max_rows: int = 256, tokenizer: Tokenizer | None = None) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self._max_rows = max_rows
        self._version = 0
        self._next_id = 0
        self._requests: dict[int, GenerationRequest] = {}
        self._aborted: list[Completion] = []
        self.on_turn: Callable[[], None] = nothing
        # What a server says of its progress.
        self.num_computed = 0

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request."""
        refuse_unfit(request, self._policy.head.banned)
        check_stop_strings(request, self._tokenizer)
        number = self._next_id
        self._next_id += 1
        self._requests[number] = request
        return number

    def results(self) -> Iterator[Completion]:
        """Generate batch by batch; completions come as their batch ends."""
        while True:
            self.on_turn()
            if not (self._requests or self._aborted):
                return
            yield from self._aborted
            self._aborted.clear()
            yield from self._run(self._next_batch())

    def abort(self, ids: Sequence[int]) -> None:
        """Drop requests whose batch has not started."""
        for number in ids:
            if self._requests.pop(number, None) is not None:
                self._aborted.append(Completion.aborted(number))

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Count a new version; `generate` reads the learner's own weights."""
        self._version = version
        return Receipt(version=version)

    def held_base(self) -> str:
        """It samples from the learner's own weights."""
        return ""

    def rest(self) -> None:
        """Nothing is kept from one rollout to the next."""

    def take_notices(self) -> list[Finding]:
        """Nothing happens to it."""
        return []

    def close(self) -> None:
        """It holds no process and no connection."""

    def _next_batch(self) -> dict[int, GenerationRequest]:
        """The queued requests with the first one's prompt length and stop tokens, up to `max_rows`."""
        batch: dict[int, GenerationRequest] = {}
        first: tuple[object, ...] | None = None
        for number, request in self._requests.items():
            shape = (len(request.prompt_token_ids), request.sampling.stop_token_ids)
            first = first or shape
            if shape == first and len(batch) < self._max_rows:
                batch[number] = request
        for number in batch:
            del self._requests[number]
        return batch

    @torch.inference_mode()
    def _run(self, batch: dict[int, GenerationRequest]) -> list[Completion]:
        if not batch:
            return []
        started = time.perf_counter()
        requests = list(batch.values())
        policy, stream = self._policy, self._policy.stream
        policy.use_stream("padded")
        try:
            sampler = _Sampler(requests, policy.device, self._count)
            self._generate(requests, sampler)
        finally:
            policy.use_stream(stream)
        seconds = time.perf_counter() - started
        tokens = torch.stack(sampler.tokens, dim=1).tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        rows = zip(batch.items(), tokens, logprobs, zip(*sampler.kept, strict=True), strict=True)
        return [self._completion(*own, ids, values, sets, seconds) for own, ids, values, sets in rows]

    def _count(self, num_tokens: int) -> None:
        self.num_computed += num_tokens

    def _generate(self, requests: Sequence[GenerationRequest], sampler: _Sampler) -> None:
        prompts = torch.tensor([r.prompt_token_ids for r in requests], device=self._policy.device)
        stop = list(requests[0].sampling.stop_token_ids)
        has_strings = any(request.sampling.stop_strings for request in requests)
        ends = [_AtStopStrings(requests, self._tokenizer)] if has_strings else []
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(r.sampling.max_new_tokens for r in requests),
            # No stop tokens is no id that exists; None would mean the model's own.
            eos_token_id=stop or [-1],
            pad_token_id=stop[0] if stop else 0,
        )
        model: Any = self._policy.model
        own = model.generation_config
        # What a request leaves open is filled in from here, repetition penalties and the like.
        model.generation_config = GenerationConfig()
        vision = self._policy.vision
        media = [request.media for request in requests]
        given: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if vision is not None:
            given = vision.given(model, prompts, media)
        try:
            with given as seen:
                model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    **seen,
                    generation_config=config,
                    logits_processor=LogitsProcessorList([sampler]),
                    stopping_criteria=StoppingCriteriaList(ends),
                )
        finally:
            model.generation_config = own

    def _completion(
        self,
        number: int,
        request: GenerationRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        sets: Sequence[KeptSets | None],
        seconds: float,
    ) -> Completion:
        tokens = tokens[: request.sampling.max_new_tokens]
        ends = [i for i, token in enumerate(tokens, start=1) if token in request.sampling.stop_token_ids][:1]
        at_string = num_until_stop(request, self._tokenizer, tokens)
        ends += [] if at_string is None else [at_string]
        length = min(ends, default=len(tokens))
        kept = [own for own in sets[:length] if own is not None]
        return Completion(
            request_id=number,
            token_ids=ints(tokens[:length]),
            logprobs=floats(logprobs[:length]),
            versions=((self._version, length),),
            finish=Finish.STOP if ends else Finish.LENGTH,
            seconds=seconds,
            kept=KeptSets.joined(kept) if kept else None,
        )
