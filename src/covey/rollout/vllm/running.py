"""Requests that run in vLLM, and what has been sampled of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.rollout.stop_strings import StopSearch
from covey.rollout.vllm import library
from covey.texts import tr
from covey.types import Completion, Finish, GenerationRequest, KeptSets
from covey.types.arrays import Versions, floats, ints, joined_runs

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclass(slots=True)
class Running:
    """A request and what has been sampled of it. `listed` says how many of the most probable tokens vLLM
    lists with each one, of a vocabulary of `vocab`."""

    request: GenerationRequest
    started: float
    search: StopSearch | None = None
    listed: int = 0
    vocab: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Versions = ()
    sets: list[list[int]] = field(default_factory=list)

    def take(self, new: Any, version: int) -> bool:
        """Add what a step of vLLM has sampled by weights of a version; returns whether a stop string ended
        it, behind which nothing is added."""
        tokens = list(new.token_ids)
        number = None if self.search is None else self.search.first_end(tokens)
        tokens = tokens[:number]
        self.tokens += tokens
        if library.is_greedy(self.request.sampling.temperature):
            # At temperature 0 the likeliest token has all of the probability.
            self.logprobs += [0.0] * len(tokens)
        else:
            self.logprobs += [at[token].logprob for token, at in zip(tokens, new.logprobs, strict=False)]
            if self.listed:
                self.sets += [self._kept(at) for _, at in zip(tokens, new.logprobs, strict=False)]
        self.versions = joined_runs([self.versions, ((version, len(tokens)),)])
        return number is not None

    def _kept(self, listed: Mapping[int, Any]) -> list[int]:
        """Return the tokens that filters kept: those whose logprob is finite. RuntimeError where there may be
        more of them than vLLM was asked for."""
        kept = [token for token, at in listed.items() if at.logprob > -math.inf]
        if len(kept) >= self.listed < self.vocab:
            raise RuntimeError(
                tr(
                    "vLLM kept at least {number} tokens with top_k {top_k}, because so many are equally "
                    "probable, and does not list more of them. Use another --top_k, or --use_vllm false.",
                    number=len(kept),
                    top_k=self.request.sampling.top_k,
                )
            )
        return kept

    def completion(self, number: int, finish: Finish) -> Completion:
        """Return the completion of request `number` with the tokens sampled so far."""
        return Completion(
            request_id=number,
            token_ids=ints(self.tokens),
            logprobs=floats(self.logprobs),
            versions=self.versions,
            finish=finish,
            seconds=time.perf_counter() - self.started,
            kept=KeptSets.of(self.sets, self.vocab) if self.listed else None,
        )


def finish_of(reason: str | None) -> Finish:
    """Translate vLLM's word for the end of a request; RuntimeError for an unknown word."""
    if reason not in _FINISHES:
        raise RuntimeError(tr("vLLM ended a request with {reason!r}.", reason=reason))
    return _FINISHES[reason]
