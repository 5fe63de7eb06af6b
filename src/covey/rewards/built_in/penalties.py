"""Penalties of repetition and of length, whose best score is 0."""

from __future__ import annotations

from collections.abc import Callable

from covey.rewards.declare import BuiltIn
from covey.rewards.lengths import soft_overlong
from covey.rewards.repetition import repetition, repetition_of_tokens

_REPETITION = ("repetition_n_grams", "repetition_max_penalty")
_OVERLONG = ("soft_max_length", "soft_cache_length")


def _penalty(name: str, function: Callable[..., list[float | None]], options: tuple[str, ...]) -> BuiltIn:
    return BuiltIn(name=name, function=function, options=options, is_penalty=True)


REPETITION = _penalty("repetition", repetition, _REPETITION)
TRLS_REPETITION = _penalty("get_repetition_penalty_reward", repetition_of_tokens, _REPETITION)
OVERLONG = _penalty("soft_overlong", soft_overlong, _OVERLONG)
TRLS_OVERLONG = _penalty("get_soft_overlong_punishment", soft_overlong, _OVERLONG)
