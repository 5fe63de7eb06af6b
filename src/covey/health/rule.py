"""How a rule over the records of a run is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from covey.health.history import History
from covey.health.sign import Sign
from covey.health.thresholds import limit

LASTING = int(limit("streak"))
"""How many times in a row most rules hold before they speak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Declares a rule, which speaks when `check` holds `streak` times in a row.

    A variable of a file in `covey.health.signs` that holds one registers it. `title` and `why` are those of
    its code. It is checked once per rollout, step or evaluation. `when` is its condition, as the
    documentation prints it.
    """

    code: str
    title: str
    why: str
    check: Callable[[History], Sign | None]
    when: str
    streak: int = 1
    each: Literal["rollout", "step", "evaluation"] = "rollout"


def num(name: str) -> str:
    """Return a threshold as a number in a text."""
    return f"{limit(name):g}"


def pct(name: str) -> str:
    """Return a threshold as a percentage."""
    return f"{limit(name):.0%}".replace("%", " %")
