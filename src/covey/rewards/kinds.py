"""The kind of a reward, guessed from its name, and whether a value is its best or its lowest."""

from __future__ import annotations

import re
from typing import Literal

from covey.rewards.builtin import PENALTIES

Kind = Literal["answer", "form", "penalty", "other"]
Standing = Literal["best", "lowest", "unknown"]

# Parts of the names of built-in rewards, of TRL's and ms-swift's, and of what users call theirs.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "penalty",
        re.compile(
            "penal|punish|overlong|too_?long|too_?short|repetit|repeat|wrong|incorrect|missing", re.IGNORECASE
        ),
    ),
    ("form", re.compile("format|tag_count|json|xml", re.IGNORECASE)),
    ("answer", re.compile("accura|correct|exact|answer|solv|math|toolbench|code_?reward", re.IGNORECASE)),
)


def kind_of(name: str) -> Kind:
    """What a reward of this name scores: `kind_of("MathAccuracy")` is "answer".

    "answer": right answers, from 0 or less (wrong) to 1 (right); "form": the form of a completion, at most
    1; "penalty": at most 0; "other": not known.
    """
    if name in PENALTIES:
        return "penalty"
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def standing(name: str, value: float, weight: float = 1.0) -> Standing:
    """Whether `value` is the best or the lowest value of a reward, if that is known.

    With a negative weight a reward is a penalty, whatever its name.
    """
    match "penalty" if weight < 0 else kind_of(name):
        case "penalty":
            return "best" if value == 0 else "unknown"
        case "form":
            return "best" if value >= 1 else "unknown"
        case "answer":
            return "best" if value >= 1 else "lowest" if value <= 0 else "unknown"
        case _:
            return "unknown"
