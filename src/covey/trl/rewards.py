"""The rewards of `trl.rewards` by their names and arguments, computed by covey's built-in ones.

A completion is its text, or messages, of which the first one's content is scored. In `reward_funcs` the three
functions mean the built-in rewards of their names; what a `get_` function returns is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rewards.accuracy import accuracy
from covey.rewards.formats import think_format_reward as think_format
from covey.rewards.lengths import cosine, soft_overlong
from covey.rewards.repetition import repetition_of_tokens
from covey.rewards.targets import means_built_in
from covey.texts import tr

Completions = Sequence[str | Sequence[dict[str, Any]]]
Values = list[float | None]
LogExtra = Callable[[str, list[Any]], None]


@means_built_in
def accuracy_reward(
    completions: Completions, solution: Sequence[Any], log_extra: LogExtra | None = None, **others: Any
) -> Values:
    """1 where the answer of a completion equals its solution, else 0; None where that cannot be read."""
    return accuracy(completions=_texts(completions), solution=solution, log_extra=log_extra)


@means_built_in
def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **others: Any,
) -> Values:
    """`accuracy_reward` of what follows the last delimiter, `</think>` if none is given; 0 without one."""
    delimiters = ("</think>",) if reasoning_delimiters is None else reasoning_delimiters
    answers = [_behind(text, delimiters) for text in _texts(completions)]
    return accuracy(completions=answers, solution=solution, log_extra=log_extra)


@means_built_in
def think_format_reward(completions: Completions, **others: Any) -> Values:
    """1 where a completion begins with one `<think>…</think>` and opens no second, else 0."""
    return think_format(completions=_texts(completions))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., Values]:
    """Return a reward of right and wrong answers that goes along half a cosine up to `max_len` tokens.

    Right ones go from `max_value_correct` for no token down to `min_value_correct`, wrong ones from
    `min_value_wrong` up to `max_value_wrong`.
    """
    right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)
    return _CosineScaled(max_len=max_len, right=right, wrong=wrong)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., Values]:
    """Return `max_penalty` times the share of the n-grams of tokens that have been there before."""
    if max_penalty > 0:
        raise ValueError(tr("max_penalty is {max_penalty}; a penalty is 0 or less.", max_penalty=max_penalty))
    return _RepetitionPenalty(ngram_size=ngram_size, max_penalty=max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., Values]:
    """Return a penalty that falls from 0 to -1 over the last `soft_punish_cache` of `max_completion_len`
    tokens, and is -1 beyond."""
    return _SoftOverlong(max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache)


@dataclass(frozen=True, kw_only=True)
class _CosineScaled:
    """`right` and `wrong` are the values of a completion without tokens and of the longest."""

    max_len: int
    right: tuple[float, float]
    wrong: tuple[float, float]
    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: Completions,
        solution: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **others: Any,
    ) -> Values:
        return cosine(
            completions=_texts(completions),
            completion_ids=completion_ids,
            solution=solution,
            cosine_min_len_value_wrong=self.wrong[0],
            cosine_max_len_value_wrong=self.wrong[1],
            cosine_min_len_value_correct=self.right[0],
            cosine_max_len_value_correct=self.right[1],
            cosine_max_len=self.max_len,
        )


@dataclass(frozen=True, kw_only=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **others: Any) -> Values:
        return repetition_of_tokens(
            completion_ids=completion_ids,
            repetition_n_grams=self.ngram_size,
            repetition_max_penalty=self.max_penalty,
        )


@dataclass(frozen=True, kw_only=True)
class _SoftOverlong:
    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **others: Any) -> Values:
        return soft_overlong(
            completion_ids=completion_ids,
            soft_max_length=self.max_completion_len,
            soft_cache_length=self.soft_punish_cache,
        )


def _texts(completions: Completions) -> list[str]:
    return [one if isinstance(one, str) else str(one[0]["content"]) for one in completions]


def _behind(text: str, delimiters: Sequence[str]) -> str:
    """Return the text behind the last place of the first delimiter that it has; "" without one."""
    there = next((delimiter for delimiter in delimiters if delimiter in text), None)
    return "" if there is None else text.rpartition(there)[2]
