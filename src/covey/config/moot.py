"""Options of other tools without a counterpart in covey; it accepts the values that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Moot:
    """A name whose values say what happens anyway; `values` empty means that any of them does.

    `words` say what covey does. `means` are values that stand for a value of an option.
    """

    words: str
    values: tuple[str, ...] = ()
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
