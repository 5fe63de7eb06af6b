"""What the completions of a run say that no metric does: repetition, identical siblings, unread answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.health.collapse import REPETITIVE
from covey.health.movement import IDENTICAL, UNPARSED
from covey.telemetry.rollouts import list_rollouts, read_rollout
from covey.types import Metric

_FIRST, _LAST = 3, 5
_LEAST_TOKENS = 32
_NGRAM = 4


def examine(directory: Path, notes: list[str]) -> dict[int, dict[str, Metric]]:
    """Metrics of the first three and the newest five rollouts, by the number of the rollout.

    All of them may be many gigabytes. A file that cannot be read is a note.
    """
    files = list_rollouts(directory)
    numbers = list(files)
    chosen = sorted({*numbers[:_FIRST], *numbers[-_LAST:]})
    found = {}
    for number in chosen:
        try:
            records = read_rollout(files[number])
            found[number] = _metrics(records)
        except (CoveyError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{files[number].name} cannot be read: {error}")
    if not numbers:
        notes.append("no rollouts on record: completions were not looked at")
    return found


def _metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    groups: dict[Any, list[tuple[int, ...]]] = {}
    repetitive, parsed = 0, []
    for record in records:
        ids = [
            token
            for token, trained in zip(record["completion_ids"], record["trained_mask"], strict=True)
            if trained
        ]
        groups.setdefault(record["group"], []).append(tuple(ids))
        repetitive += is_repetitive(ids)
        parsed.append((record.get("extras") or {}).get("parsed_by"))
    same = [len(set(g)) == 1 for g in groups.values() if len(g) > 1]
    read = [p for p in parsed if p is not None]
    metrics = {REPETITIVE: Metric(value=repetitive / len(records), count=len(records))} if records else {}
    if same:
        metrics[IDENTICAL] = Metric(value=sum(same) / len(same), count=len(same))
    if read:
        metrics[UNPARSED] = Metric(value=sum(p == "none" for p in read) / len(read), count=len(read))
    return metrics


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether one token is more than half of a completion, or repeated 4-grams are.

    Below 32 tokens a completion says nothing: a short answer repeats itself easily.
    """
    if len(ids) < _LEAST_TOKENS:
        return False
    if Counter(ids).most_common(1)[0][1] > len(ids) / 2:
        return True
    grams = [tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1)]
    return len(set(grams)) < len(grams) / 2
