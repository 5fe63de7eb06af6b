"""How the value of a gold column is read: as one text, as alternatives, or as the parts of one answer.

A text is one answer, whatever it contains. The members of a list are alternatives or, with `gold_lists`
"all", the parts of one answer; the members of a list within a list are always parts. Of an object the value
of its first known key is read, and its aliases are further alternatives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice, product
from typing import Any, Literal

from covey.errors import CoveyError
from covey.rewards.answers import extract_gold
from covey.texts import tr
from covey.types import GOLD_KEYS

GoldLists = Literal["any", "all"]

# What holds alternatives by its name; `text` is one beside where the answer starts, as in SQuAD.
_ALIASES = "aliases"
_TEXT, _BESIDE = "text", "answer_start"
# Answers that parts with aliases make together.
_MOST_COMBINED = 100


class UnreadableGold(CoveyError):
    """A list or an object has no answer; the message says why."""


def gold_texts(gold: Any, lists: GoldLists | None = None) -> tuple[str, ...]:
    """The alternatives of a gold as texts, without duplicates; raises UnreadableGold if there are none.

    `gold_texts(["Paris", "City of Paris"])` is those two, and with `lists="all"` the one text
    "Paris, City of Paris".
    """
    try:
        return tuple(dict.fromkeys(_texts(gold, is_any=lists != "all")))
    except RecursionError:
        raise UnreadableGold(tr("its lists or objects are nested too deeply")) from None


def has_several(gold: Any) -> bool:
    """Whether a gold is a list of several members, so that `gold_lists` decides how it is read."""
    if isinstance(gold, Mapping):
        held = _held(gold)
        key = _answer_key(held)
        return key is not None and not _alternatives(gold, held) and has_several(held[key])
    return isinstance(gold, list | tuple) and sum(member is not None for member in gold) > 1


def shown(gold: Any) -> str:
    """A gold as messages show it."""
    try:
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, default=str)
    except RecursionError:
        return "..."


def _texts(gold: Any, *, is_any: bool) -> list[str]:
    gold = _plain(gold)
    if isinstance(gold, Mapping):
        return _of_keys(gold, is_any=is_any)
    if not isinstance(gold, list | tuple):
        return [str(gold)]
    if not is_any:
        return _joined(gold)
    texts: list[str] = []
    why = UnreadableGold(tr("it is an empty list"))
    for member in gold:
        if member is None:
            continue
        try:
            # An object within a list has alternatives of its own, a list within it has parts.
            texts += _texts(member, is_any=isinstance(member, Mapping))
        except UnreadableGold as error:
            why = error
    if not texts:
        raise why
    return texts


def _joined(parts: list[Any] | tuple[Any, ...]) -> list[str]:
    """The members as one answer; each part is where a solution text says it is."""
    if not parts or None in parts:
        raise UnreadableGold(tr("it is an empty list") if not parts else tr("a part of it is missing"))
    if len(parts) == 1:
        return _texts(parts[0], is_any=False)
    several = product(*([extract_gold(text) for text in _texts(part, is_any=False)] for part in parts))
    return [", ".join(combined) for combined in islice(several, _MOST_COMBINED)]


def _of_keys(gold: Mapping[Any, Any], *, is_any: bool) -> list[str]:
    held = _held(gold)
    key, aliases = _answer_key(held), _alternatives(gold, held)
    if not gold:
        raise UnreadableGold(tr("it is an empty object"))
    if key is None and not aliases:
        empty = next((str(name) for name in gold if str(name).casefold() in (*GOLD_KEYS, _ALIASES)), None)
        if empty is not None:
            raise UnreadableGold(tr("it is an object whose {key} is empty", key=empty))
        keys = ", ".join(map(str, gold))
        known = ", ".join((*GOLD_KEYS, _ALIASES))
        raise UnreadableGold(
            tr(
                "it is an object with the keys {keys}; covey reads an answer from the keys {known}, and "
                "from text if there is also answer_start",
                keys=keys,
                known=known,
            )
        )
    texts = [] if key is None else _texts(held[key], is_any=is_any)
    for value in aliases:
        texts += _texts(value, is_any=True)
    return texts


def _held(gold: Mapping[Any, Any]) -> dict[str, Any]:
    """The values of an object by lower-case key, without empty ones."""
    plain = {str(key).casefold(): _plain(value) for key, value in gold.items()}
    return {key: value for key, value in plain.items() if value not in (None, "", [], {})}


def _plain(value: Any) -> Any:
    """An array of numpy or torch as a list; other values unchanged."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _answer_key(held: Mapping[str, Any]) -> str | None:
    return next((key for key in GOLD_KEYS if key in held), None)


def _alternatives(gold: Mapping[Any, Any], held: Mapping[str, Any]) -> list[Any]:
    """The lists of an object that are alternatives whatever `gold_lists` is."""
    is_beside = any(str(key).casefold() == _BESIDE for key in gold)
    names = (_ALIASES, _TEXT) if is_beside else (_ALIASES,)
    return [held[name] for name in names if name in held]
