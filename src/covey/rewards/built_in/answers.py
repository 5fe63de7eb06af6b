"""Rewards for right answers."""

from __future__ import annotations

from collections.abc import Callable

from covey.rewards.accuracy import accuracy, reasoning_accuracy
from covey.rewards.declare import BuiltIn
from covey.rewards.lengths import cosine
from covey.rewards.toolbench import toolbench
from covey.types import GOLD_COLUMNS

_TRLS_GOLD = ("solution",)
_LISTS = ("gold_lists",)
_COSINE = (
    "cosine_min_len_value_wrong",
    "cosine_max_len_value_wrong",
    "cosine_min_len_value_correct",
    "cosine_max_len_value_correct",
    "cosine_max_len",
    "gold_lists",
)


def _parsing(
    name: str, function: Callable[..., list[float | None]], options: tuple[str, ...], golds: tuple[str, ...]
) -> BuiltIn:
    return BuiltIn(name=name, function=function, options=options, golds=golds, parses_gold=True)


ACCURACY = _parsing("accuracy", accuracy, _LISTS, GOLD_COLUMNS)
TRLS_ACCURACY = _parsing("accuracy_reward", accuracy, _LISTS, _TRLS_GOLD)
REASONING = _parsing("reasoning_accuracy", reasoning_accuracy, _LISTS, GOLD_COLUMNS)
TRLS_REASONING = _parsing("reasoning_accuracy_reward", reasoning_accuracy, _LISTS, _TRLS_GOLD)
COSINE = _parsing("cosine", cosine, _COSINE, GOLD_COLUMNS)
TRLS_COSINE = _parsing("get_cosine_scaled_reward", cosine, _COSINE, _TRLS_GOLD)
TOOLBENCH = BuiltIn(name="toolbench", function=toolbench, golds=_TRLS_GOLD)
