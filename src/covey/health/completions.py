"""What the completions of a rollout say that rewards and lengths do not: repetition, identical siblings,
unread answers. The same for a run while it trains and for its rollout files afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from covey.health.collapse import REPETITIVE
from covey.health.movement import IDENTICAL, UNPARSED
from covey.types import Metric

# What is looked at for repetition, of however large a rollout: about 25 ms of Python.
_MOST_COMPLETIONS, _MOST_TOKENS = 128, 1024
_LEAST_TOKENS = 32
_NGRAM = 4


def completion_metrics(
    groups: Sequence[Sequence[Sequence[int]]], parsed_by: Sequence[str | None]
) -> dict[str, Metric]:
    """Shares of completions that repeat themselves, of groups whose siblings are all equal, and of answers
    that cannot be read.

    `groups` holds the trained token ids of every completion, `parsed_by` the word of the reward that reads
    answers, one a completion (None: no reward does). Repetition is looked for in 128 completions, evenly
    spread over the rollout. What nothing can be said of has no metric.
    """
    metrics = {}
    flat = [ids for siblings in groups for ids in siblings]
    looked_at = flat[:: -(-len(flat) // _MOST_COMPLETIONS) or 1]
    if looked_at:
        share = sum(map(is_repetitive, looked_at)) / len(looked_at)
        metrics[REPETITIVE] = Metric(value=share, count=len(looked_at))
    same = [all(ids == first for ids in rest) for first, *rest in groups if rest]
    if same:
        metrics[IDENTICAL] = Metric(value=sum(same) / len(same), count=len(same))
    read = [p for p in parsed_by if p is not None]
    if read:
        metrics[UNPARSED] = Metric(value=sum(p == "none" for p in read) / len(read), count=len(read))
    return metrics


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether one token is more than half of a completion, or repeated 4-grams are.

    Its last 1,024 tokens are looked at, as what falls into a loop stays there. Below 32 tokens a completion
    says nothing: a short answer repeats itself easily.
    """
    ids = ids[-_MOST_TOKENS:]
    if len(ids) < _LEAST_TOKENS:
        return False
    if Counter(ids).most_common(1)[0][1] > len(ids) / 2:
        return True
    grams = set(zip(*(ids[i:] for i in range(_NGRAM)), strict=False))
    return len(grams) < (len(ids) - _NGRAM + 1) / 2
