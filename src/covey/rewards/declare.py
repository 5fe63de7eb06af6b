"""How a built-in reward is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """Declares a reward of `--reward_funcs`; a variable of a file in `covey.rewards.built_in` registers it.

    `options` are those of the run that the function is called with. `golds` are the columns that may hold its
    gold, of which the data has one; `parses_gold` where that is read as an answer. With `is_penalty` its best
    score is 0.
    """

    name: str
    function: Callable[..., list[float | None]]
    options: tuple[str, ...] = ()
    golds: tuple[str, ...] = ()
    parses_gold: bool = False
    is_penalty: bool = False
