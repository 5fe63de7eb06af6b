"""The reward `toolbench`: whether a completion calls the tool that its gold calls, with the same input."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from covey.rewards.units import units

_ACTION, _INPUT = "Action:", "Action Input:"
_OBSERVATION = re.compile(r"^\s*Observation:", re.MULTILINE)


def toolbench(*, completions: Sequence[str], solution: Sequence[Any]) -> list[float | None]:
    """How alike the last `Action Input:` of completion and gold are, from 0 to 1, where the names after their
    last `Action:` are the same; else 0.

    Two JSON objects: F1 of their entries, half an entry for a key with another value. Two texts: F-measure of
    ROUGE-L. JSON beside text: 0. A gold without `Action:` scores None.
    """
    return [_score(gold, text) for text, gold in zip(completions, solution, strict=True)]


def _score(gold: Any, text: str) -> float | None:
    gold_call = _call(gold) if isinstance(gold, str) else None
    if gold_call is None:
        return None
    own_call = _call(text)
    if own_call is None or own_call[0] != gold_call[0]:
        return 0.0
    return _alike(gold_call[1], own_call[1])


def _call(text: str) -> tuple[str, str] | None:
    """Name and input of the last action of a text, up to what is observed of it; None without an action."""
    _, mark, call = text.rpartition(_ACTION)
    if not mark:
        return None
    name, _, rest = call.partition(_INPUT)
    return _OBSERVATION.split(name)[0].strip(), _OBSERVATION.split(rest)[0].strip()


def _alike(gold: str, answer: str) -> float:
    first, second = _read(gold), _read(answer)
    if first == second:
        return 1.0
    if isinstance(first, dict) and isinstance(second, dict):
        same = sum(1.0 if second[key] == first[key] else 0.5 for key in first if key in second)
        return 2 * same / (len(first) + len(second))
    return 0.0 if isinstance(first, dict) or isinstance(second, dict) else rouge_l(gold, answer)


def _read(text: str) -> Any:
    """An input as the JSON that it is, else as text; a tool without input is called with none or with {}."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def rouge_l(gold: str, text: str) -> float:
    """F-measure of ROUGE-L: twice the longest common subsequence of words over the words of both (Lin 2004,
    with beta 1)."""
    first, second = units(gold), units(text)
    return 2 * _common(first, second) / (len(first) + len(second)) if first and second else 0.0


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, by Hyyrö's bit vectors: a row of the table is one number."""
    places: dict[str, int] = {}
    for i, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << i
    whole = row = (1 << len(first)) - 1
    for word in second:
        hits = row & places.get(word, 0)
        row = (row + hits | row - hits) & whole
    return len(first) - row.bit_count()
