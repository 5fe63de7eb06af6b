"""The canary: a few fixed prompts that an engine samples after every publish, held to the learner.

A fingerprint says which bits an engine holds. It does not say which of them the engine computes with: a head
that was packed beforehand, a cache of prompts or an adapter that is left out shows in the log-probabilities
alone.

Axes: N sampled tokens, R rows of the vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.rollout.engine import Engine
from covey.rollout.filters import filters_of
from covey.rollout.noise import draws, row_key, token_table
from covey.texts import tr
from covey.types import Completion, Finish, GenerationRequest, Medium, SamplingParams, TurnId
from covey.types.arrays import floats, ints

# The first new token follows the prompt, the second a step of decoding; a further one would read all weights
# again. All together are a stream of 30 tokens for the learner: on a CPU one of up to 32 takes as long.
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 6, 4, 2
# A bound is this many times the gap of the first publish, and at least what rounding may make of one token.
_MARGIN = 4.0
_LEAST, _LEAST_LOW = 1e-4, 0.15
# Two engines with the same weights are never further apart than this.
_MOST, _MOST_LOW = 1e-2, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnersView:
    """What the learner says of what was sampled, in the order of the completions.

    `logprob_N` of each sampled token, and `logprob_RV` of the whole vocabulary in place of the first R of
    them; float32, on the CPU.
    """

    logprob_N: Tensor
    logprob_RV: Tensor


Sampled = tuple[GenerationRequest, Completion]
View = Callable[[Sequence[Sampled]], LearnersView]
"""Asks the learner. Collective: every rank makes as many forward passes, whatever it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The prompts that are sampled after a publish, what asks the learner about them, and the bound."""

    requests: tuple[GenerationRequest, ...]
    view: View
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a canary found of one engine: the largest |logprob - learner's| of `num_tokens`, the number of the
    token that it is at, and in words the first token that its own noise does not draw."""

    gap: float
    at: int
    num_tokens: int
    wrong_token: str = ""


def canary_requests(
    vocab: int, banned: tuple[int, ...] = (), media: Sequence[Medium] = ()
) -> tuple[GenerationRequest, ...]:
    """The prompts: random tokens of a vocabulary, the same in every run, at a temperature of 1, and answers
    without banned tokens. Each of the `media` has a prompt, whose text is the same for all of them."""
    chosen = np.random.default_rng(0).integers(vocab, size=(_PROMPTS, _PROMPT_TOKENS))
    # Placeholders without images have no meaning.
    chosen[np.isin(chosen, banned)] = next(token for token in range(vocab) if token not in banned)
    prompts: list[tuple[list[int], tuple[Medium, ...]]] = [(prompt, ()) for prompt in chosen.tolist()]
    before, behind = chosen[0].tolist()[:2], chosen[0].tolist()[2:]
    prompts += [([*before, *[one.token_id] * one.num_tokens, *behind], (one,)) for one in media]
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=_NEW_TOKENS, stop_token_ids=(), banned_token_ids=banned
    )
    return tuple(
        GenerationRequest(
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            turn=TurnId(seed=0, split="canary", rollout=0, attempt=0, prompt_id=number, sibling=0),
            media=own,
        )
        for number, (prompt, own) in enumerate(prompts)
    )


def sample_canary(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """The completions of an engine, in the order of the requests. Raises ValueError where one is missing or
    has no token."""
    numbers = [engine.submit(request) for request in requests]
    found = {completion.request_id: completion for completion in engine.results()}
    lost = [n for n in numbers if n not in found or not len(found[n].token_ids)]
    if lost:
        raise ValueError(
            tr(
                "{num_lost} of {num_numbers} test completions have no tokens",
                num_lost=len(lost),
                num_numbers=len(numbers),
            )
        )
    return [found[n] for n in numbers]


class Comparison:
    """The learner's numbers for all that the engines sampled; completions that are equal are asked for once.
    Making one is collective."""

    def __init__(self, canary: Canary, sampled: Sequence[Sequence[Completion]]) -> None:
        self._requests = canary.requests
        asked = {
            (number, _tokens(completion)): completion
            for own in sampled
            for number, completion in enumerate(own)
        }
        # A rank whose engine sampled nothing makes its pass for the others' sake.
        pairs = [(self._requests[number], completion) for (number, _), completion in asked.items()]
        self._view = canary.view(pairs or [(self._requests[0], _one_token())])
        self._start: dict[tuple[int, tuple[int, ...]], int] = {}
        self._row: dict[tuple[int, tuple[int, ...]], int] = {}
        total = 0
        for number, tokens in asked:
            self._start[number, tokens] = total
            for position in range(len(tokens)):
                self._row.setdefault((number, tokens[:position]), total + position)
            total += len(tokens)

    def of(self, completions: Sequence[Completion], *, has_keys: bool, bound: float) -> Outcome:
        """How far one engine is from the learner; with noise keys its tokens too, where the learner's two
        best ones are further apart than two gaps of `bound`."""
        learner_N = torch.cat([self._logprobs(*pair) for pair in enumerate(completions)])
        engine_N = torch.cat([torch.tensor(completion.logprobs) for completion in completions])
        gap_N = (engine_N - learner_N).abs().nan_to_num(nan=math.inf)
        at = int(gap_N.argmax())
        wrong = self._wrong_token(completions, bound) if has_keys else ""
        return Outcome(gap=float(gap_N[at]), at=at, num_tokens=int(gap_N.shape[0]), wrong_token=wrong)

    def _logprobs(self, number: int, completion: Completion) -> Tensor:
        start = self._start[number, _tokens(completion)]
        return self._view.logprob_N[start : start + len(completion.token_ids)]

    def _wrong_token(self, completions: Sequence[Completion], bound: float) -> str:
        """The first token that the learner does not draw with the same noise, in words."""
        places = [
            (row, row_key(self._requests[number].turn), position, token, number)
            for number, completion in enumerate(completions)
            for tokens in [_tokens(completion)]
            for position, token in enumerate(tokens)
            if (row := self._row[number, tokens[:position]]) < self._view.logprob_RV.shape[0]
        ]
        if not places:
            return ""
        *found, numbers = zip(*places, strict=True)
        row_R, key_R, position_R, token_R = map(torch.tensor, found)
        filters = filters_of([self._requests[number].sampling for number in numbers], row_R.device)
        table_V = token_table(self._view.logprob_RV.shape[1], row_R.device)
        drawn_R, margin_R = draws(self._view.logprob_RV[row_R], key_R, position_R, table_V, filters)
        wrong = ((drawn_R != token_R) & (margin_R > 2 * bound)).nonzero()
        if not wrong.numel():
            return ""
        first = int(wrong[0, 0])
        return tr(
            "it drew token {token_r} where the learner, with the same noise, draws {drawn_r}, by "
            "{margin_r:.3g}",
            token_r=int(token_R[first]),
            drawn_r=int(drawn_R[first]),
            margin_r=float(margin_R[first]),
        )


class Bound:
    """The largest gap that is rounding, learned at the first publish of a process; `learner` and `engine` are
    what each computes in."""

    def __init__(self, learner: torch.dtype, engine: torch.dtype) -> None:
        is_low = {learner, engine} != {torch.float32}
        self._least, self.most = (_LEAST_LOW, _MOST_LOW) if is_low else (_LEAST, _MOST)
        self._learned: float | None = None

    @property
    def is_learned(self) -> bool:
        """Whether a first gap is known."""
        return self._learned is not None

    @property
    def value(self) -> float:
        """The bound: a multiple of the first gap, or what no healthy engine reaches before there is one."""
        return self.most if self._learned is None else max(self._least, _MARGIN * self._learned)

    def learn(self, gap: float) -> None:
        """Take the largest gap of a publish; that of the first one counts."""
        if self._learned is None:
            self._learned = gap


def _tokens(completion: Completion) -> tuple[int, ...]:
    """The sampled tokens, as what can be looked up."""
    return tuple(completion.token_ids.tolist())


def _one_token() -> Completion:
    return Completion(
        request_id=0,
        token_ids=ints([0]),
        logprobs=floats([0.0]),
        versions=((0, 1),),
        finish=Finish.LENGTH,
        seconds=0.0,
    )
