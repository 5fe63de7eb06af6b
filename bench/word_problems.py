"""One-step word problems about small numbers: `question`, and `answer` as GSM8K writes it."""

from __future__ import annotations

import itertools
import random
from typing import Any

_NAMES = ("Tom", "Ana", "Li", "Sam", "Mia", "Omar", "Eva", "Ben")
_THINGS = ("apples", "coins", "books", "pens", "shells", "cards", "stamps", "balls")
_MORE = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
)
_LESS = (
    "{name} had {a} {things} and gave away {b}. How many {things} are left?",
    "{name} had {a} {things} and lost {b}. How many {things} are left?",
)
_NUMBERS = range(2, 11)
_SEED = 20_261


def problems(count: int, *, is_held_out: bool) -> list[dict[str, Any]]:
    """The first `count` problems for training, or the last `count`, which are held out; 14,976 in all."""
    more = itertools.product(_MORE, _NAMES, _THINGS, _NUMBERS, _NUMBERS)
    less = (p for p in itertools.product(_LESS, _NAMES, _THINGS, _NUMBERS, _NUMBERS) if p[-2] > p[-1])
    every = [*more, *less]
    random.Random(_SEED).shuffle(every)
    return [_row(*one) for one in (every[-count:] if is_held_out else every[:count])]


def _row(form: str, name: str, things: str, a: int, b: int) -> dict[str, Any]:
    question = form.format(name=name, things=things, a=a, b=b)
    return {"question": question, "answer": f"#### {a + b if form in _MORE else a - b}"}
