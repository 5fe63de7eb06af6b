"""How a check is declared, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from covey.codes import Code
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.types import Problem

Judge = Callable[[Config, Facts, Collection[str] | None], list[Problem]]
"""Is given a configuration, the facts that were looked up for it, and the names of the options that the user
gave, where somebody knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Declares a check, which returns every problem and warning of its subject.

    A variable that holds one registers it: in a file of `covey.checks`, or in the `judge.py` of a folder
    there. Those with a lower `place` are printed first. `codes` are those that stand beside it; the others
    are in `covey.codes`.
    """

    judge: Judge
    place: int = 1000
    codes: tuple[Code, ...] = ()
