"""Whether the lists of a gold column are alternatives, as far as their members or its name show."""

from __future__ import annotations

import functools
import re
from itertools import combinations
from typing import Any

from covey.rewards.answers import extract_gold
from covey.rewards.equal import is_equal
from covey.rewards.gold_texts import UnreadableGold, gold_texts, has_several
from covey.rewards.values import Kind, Value, read

# A word, not the name of a choice or of an unknown.
_WORD = re.compile(r"[^\W\d_]{2}|[^\W\d_a-zA-Z]")
_NAMES = ("golden_answers", "aliases", "targets")
# Members that are compared with each other, of a list that has more.
_MOST_MEMBERS = 6
# Lists of a column whose formulas are compared: math-verify takes time.
_MOST_FORMULAS = 20


def names_alternatives(column: str) -> bool:
    """Whether the name of a column says that its lists are alternatives, such as `aliases`."""
    return "_".join(column.lower().split()) in _NAMES


class ColumnLists:
    """The lists with several members in a column, counted while its golds are read.

    num_lists   how many there are
    num_shown   those whose members are alternatives: words, or equal to each other by covey's comparison
    num_open    those of different letters, numbers or formulas: alternatives, or the parts of one answer
    first_open  the first of these, as (row, gold)
    num_named   objects that hold several answers, which are alternatives by the names of their keys
    """

    def __init__(self) -> None:
        self.num_lists = self.num_shown = self.num_open = self.num_named = 0
        self.first_open: tuple[int, Any] | None = None
        self._formulas_left = _MOST_FORMULAS

    @property
    def is_decided(self) -> bool:
        """Whether the column's lists are taken as alternatives: at least half of them show it."""
        return self.num_open <= self.num_shown

    def add(self, row: int, gold: Any) -> None:
        """Count a gold, if it is a list of several members or an object with several answers."""
        try:
            texts = gold_texts(gold)
        except UnreadableGold:
            return
        if not has_several(gold):
            self.num_named += len(texts) > 1
            return
        self.num_lists += 1
        match self._are_alternatives(texts):
            case True:
                self.num_shown += 1
            case False:
                self.num_open += 1
                self.first_open = self.first_open or (row, gold)

    def _are_alternatives(self, texts: tuple[str, ...]) -> bool | None:
        """Whether the members show that they are; None for formulas that are not compared any more."""
        golds = list(dict.fromkeys(extract_gold(text) for text in texts))[:_MOST_MEMBERS]
        if len(golds) == 1 or any(_has_words(read(gold)) for gold in golds):
            return True
        formulas = [gold for gold in golds if read(gold).kind is Kind.MATHS]
        if formulas and self._formulas_left == 0:
            return None
        self._formulas_left -= bool(formulas)
        return any(_are_equal(first, second) for first, second in combinations(golds, 2))


@functools.lru_cache(4096)
def _are_equal(first: str, second: str) -> bool:
    return is_equal(first, second) or is_equal(second, first)


def _has_words(value: Value) -> bool:
    if value.items and value.kind is not Kind.CHOICE:
        return any(_has_words(item) for item in value.items)
    return value.kind is Kind.WORDS and _WORD.search(value.text) is not None
