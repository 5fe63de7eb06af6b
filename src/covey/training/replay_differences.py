"""Compares a replayed episode with its record, and names each difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from covey.data.text import TextCodec
from covey.rollout.replayed import turns_of
from covey.telemetry.jsonl import encode
from covey.texts import tr
from covey.types import Episode, Outcome, Turn
from covey.types.arrays import num_true
from covey.types.episode import digest_of

Part = Literal["text", "tokens", "begin", "result", "answer", "reward", "end", "final_reward", "failure"]

# Tokens of a text that is shown behind a difference.
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holds a `part` of an episode as it was recorded and as it is now.

    `text`: the text of a turn is not that of its tokens. `tokens`: a token of a sequence. `begin`: what the
    environment made of the prompt. `result`, `answer`, `reward`: what followed a turn. `end`: whether the
    episode ended behind it. `final_reward`: what the environment gave. `failure`: an environment failed.
    Turns, sequences and tokens are counted from 1; None where the part is of none.
    """

    part: Part
    recorded: str
    now: str
    turn: int | None = None
    sequence: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Holds the first token of a new draw that is another one than the recorded one, by turn and number from
    1, with both tokens as text and how far their logprobs are apart; `same` where there is none."""

    same: bool
    turn: int | None = None
    token: int | None = None
    recorded: str = ""
    now: str = ""
    logprob_gap: float | None = None


def rendering_differences(recorded: Episode, now: Episode, codec: TextCodec) -> tuple[Difference, ...]:
    """Return turns whose text is not that of their tokens, and the first token that is rendered otherwise."""
    found = list(_texts(recorded, now))
    for number, (own, other) in enumerate(zip_longest(recorded.tokens, now.tokens), 1):
        ids, others = (() if s is None else s.token_ids.tolist() for s in (own, other))
        if (token := _first_other(ids, others)) is not None:
            then, text = (codec.written_out(part[token : token + _SHOWN]) for part in (ids, others))
            found.append(Difference(part="tokens", recorded=then, now=text, sequence=number, token=token + 1))
            break
    return tuple(found)


def _texts(recorded: Episode, now: Episode) -> Iterator[Difference]:
    if not recorded.turns:
        if recorded.text != now.text:
            yield Difference(part="text", recorded=recorded.text, now=now.text, turn=1)
        return
    texts = [turn.text for turn in now.turns]
    for number, (own, tokens) in enumerate(zip(recorded.turns, turns_of(recorded), strict=True), 1):
        text = texts[number - 1] if number <= len(texts) else ""
        stays = tokens.token_ids[: len(tokens.token_ids) - len(own.cut_ids)]
        if own.text != text or own.digest != digest_of(stays):
            yield Difference(part="text", recorded=own.text, now=text, turn=number)


def environment_differences(
    recorded: Episode,
    messages: Sequence[Mapping[str, Any]] | None,
    reward: float | None,
    now: Episode,
) -> tuple[Difference, ...]:
    """Return what tools and environment answer otherwise. `messages` are those that the environment began
    the recorded episode with, and `reward` what it gave (None: nobody counted it)."""
    if now.outcome is Outcome.INFRASTRUCTURE:
        return (Difference(part="failure", recorded="", now=now.failure),)
    found = []
    if not _is_same(messages, now.prompt_messages):
        texts = _text(messages or ()), _text(now.prompt_messages or ())
        found.append(Difference(part="begin", recorded=texts[0], now=texts[1]))
    for number, (own, other) in enumerate(zip_longest(recorded.turns, now.turns), 1):
        if own is None or other is None:
            ended = tr("the episode ended"), tr("the episode went on")
            then, text = ended if other is not None else ended[::-1]
            found.append(Difference(part="end", recorded=then, now=text, turn=number - 1))
            break
        found += _of_turn(number, own, other)
    else:
        if recorded.outcome is not now.outcome:
            outcomes = str(recorded.outcome), str(now.outcome)
            found.append(Difference(part="end", recorded=outcomes[0], now=outcomes[1], turn=len(now.turns)))
    if reward is not None and not _is_same(reward, _real(now.environment_reward)):
        found.append(
            Difference(part="final_reward", recorded=encode(reward), now=encode(now.environment_reward))
        )
    return tuple(found)


def _of_turn(number: int, own: Turn, other: Turn) -> Iterator[Difference]:
    """Return what followed a turn otherwise."""
    results = list(zip_longest(own.results, other.results))
    for then, now in results:
        texts = [None if r is None else (r.content, r.failure) for r in (then, now)]
        if texts[0] != texts[1]:
            words = ["" if text is None else text[0] for text in texts]
            yield Difference(part="result", recorded=words[0], now=words[1], turn=number)
    # The answer to calls is made of their results.
    if not results and not _is_same(own.answer, other.answer):
        yield Difference(part="answer", recorded=_text(own.answer), now=_text(other.answer), turn=number)
    if not _is_same(_real(own.reward), _real(other.reward)):
        yield Difference(part="reward", recorded=encode(own.reward), now=encode(other.reward), turn=number)


def drawn_again(recorded: Episode, now: Episode, codec: TextCodec) -> Drawn:
    """Compare the sampled tokens of a new draw with those of the record."""
    pairs = zip_longest(_sampled(recorded), _sampled(now), fillvalue=((), ()))
    for turn, ((ids, logprobs), (others, other_logprobs)) in enumerate(pairs, 1):
        if (token := _first_other(ids, others)) is None:
            continue
        gap = None
        if token < len(ids) and token < len(others):
            gap = abs(logprobs[token] - other_logprobs[token])
        texts = [codec.written_out(part[token : token + 1]) for part in (ids, others)]
        return Drawn(same=False, turn=turn, token=token + 1, recorded=texts[0], now=texts[1], logprob_gap=gap)
    return Drawn(same=True)


def _sampled(episode: Episode) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Return ids and logprobs of each turn of the model."""
    found: list[tuple[Sequence[int], Sequence[float]]] = []
    for sequence in episode.tokens:
        sizes = [num_true(sequence.is_trained[end - num : end]) for end, num in sequence.turn_runs]
        ends = np.cumsum(sizes)[:-1]
        pieces = (np.split(values, ends) for values in (sequence.trained_ids, sequence.logprobs))
        found += [(ids.tolist(), logprobs.tolist()) for ids, logprobs in zip(*pieces, strict=True)]
    return found


def _first_other(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the number of the first id that differs, from 0; None where all are the same."""
    return next((n for n, (a, b) in enumerate(zip_longest(ids, others)) if a != b), None)


def _real(value: float | str | None) -> float | None:
    """Return a reward as a float; a record has non-finite ones as words."""
    return None if value is None else float(value)


def _is_same(one: Any, other: Any) -> bool:
    return encode(one) == encode(other)


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    contents = [message.get("content") for message in messages]
    if all(isinstance(content, str) for content in contents):
        return "\n".join(map(str, contents))
    return json.dumps(list(map(dict, messages)), ensure_ascii=False, default=str)
