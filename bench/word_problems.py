"""One-step word problems about small numbers: `question`, and `answer` as GSM8K writes it."""

from __future__ import annotations

import itertools
import random
from typing import Any

_NAMES = ("Tom", "Ana", "Li", "Sam", "Mia", "Omar", "Eva", "Ben")
_THINGS = ("apples", "coins", "books", "pens", "shells", "cards", "stamps", "balls")
_FORMS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", 1),
    ("{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?", 1),
    ("{name} had {c} {things} and gave away {b}. How many {things} are left?", -1),
    ("{name} had {c} {things} and lost {b}. How many {things} are left?", -1),
)
_NUMBERS = range(2, 11)
_SEED = 20_261


def problems(count: int, *, is_held_out: bool) -> list[dict[str, Any]]:
    """The first `count` problems for training, or the last `count`, which are held out; 20,736 in all."""
    every = list(itertools.product(_FORMS, _NAMES, _THINGS, _NUMBERS, _NUMBERS))
    random.Random(_SEED).shuffle(every)
    chosen = every[-count:] if is_held_out else every[:count]
    return [_row(*one) for one in chosen]


def _row(form: tuple[str, int], name: str, things: str, a: int, b: int) -> dict[str, Any]:
    text, sign = form
    total = a + b
    question = text.format(name=name, things=things, a=a, b=b, c=total)
    return {"question": question, "answer": f"#### {total if sign > 0 else a}"}
