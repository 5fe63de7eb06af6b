"""Requests that run in vLLM, and what has been sampled of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from covey.rollout.vllm import library
from covey.texts import tr
from covey.types import Completion, Finish, GenerationRequest
from covey.types.arrays import Versions, floats, ints, joined_runs

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclass(slots=True)
class Running:
    """A request and what has been sampled of it."""

    request: GenerationRequest
    started: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Versions = ()

    def take(self, new: Any, version: int) -> None:
        """Add what a step of vLLM has sampled by weights of a version."""
        tokens = list(new.token_ids)
        self.tokens += tokens
        if library.is_greedy(self.request.sampling.temperature):
            # At temperature 0 the likeliest token has all of the probability.
            self.logprobs += [0.0] * len(tokens)
        else:
            self.logprobs += [at[token].logprob for token, at in zip(tokens, new.logprobs, strict=True)]
        self.versions = joined_runs([self.versions, ((version, len(tokens)),)])

    def completion(self, number: int, finish: Finish) -> Completion:
        """Return the completion of request `number` with the tokens sampled so far."""
        return Completion(
            request_id=number,
            token_ids=ints(self.tokens),
            logprobs=floats(self.logprobs),
            versions=self.versions,
            finish=finish,
            seconds=time.perf_counter() - self.started,
        )


def finish_of(reason: str | None) -> Finish:
    """Translate vLLM's word for the end of a request; RuntimeError for an unknown word."""
    if reason not in _FINISHES:
        raise RuntimeError(tr("vLLM ended a request with {reason!r}.", reason=reason))
    return _FINISHES[reason]
