"""What the completions of a rollout say that mean rewards and lengths do not: repetition, identical siblings,
one text for many prompts, unread answers, rewards that follow the length.

The same for a run while it trains and for its rollout files afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from covey.health.names import IDENTICAL, MOST_COMMON, PAID_LENGTH, REPETITIVE, UNPARSED
from covey.rollout.repetition import is_repetitive
from covey.types import Metric

# What is looked at for repetition, of however large a rollout: about 25 ms of Python.
_MOST_COMPLETIONS = 128
# Fewer prompts may well have one answer.
_LEAST_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Describes a completion: `length` counts its trained tokens, equal completions have an equal `key`,
    and `is_repetitive` finds out whether it repeats itself, which takes about 0.2 ms."""

    length: int
    key: Hashable
    is_repetitive: Callable[[], bool]

    @classmethod
    def of(cls, ids: Sequence[int]) -> Said:
        """A completion of these tokens."""
        return cls(length=len(ids), key=tuple(ids), is_repetitive=partial(is_repetitive, ids))


def completion_metrics(
    groups: Sequence[Sequence[Said]],
    parsed_by: Sequence[str | None],
    prompts: Sequence[Hashable] = (),
    rewards: Sequence[Sequence[float | None]] = (),
) -> dict[str, Metric]:
    """Shares of completions that repeat themselves, of groups whose siblings are all equal, and of answers
    that cannot be read; the share of the most common completion; the correlation of reward and length.

    `groups` holds every completion, `parsed_by` the word of the reward that reads
    answers, one a completion (None: no reward does). `prompts` names the prompt of each group, and `rewards`
    has the total of each completion. Repetition is looked for in 128 completions, evenly spread over the
    rollout. What nothing can be said of has no metric, or the value None where another rollout may have it.
    """
    metrics = {}
    flat = [said for siblings in groups for said in siblings]
    looked_at = flat[:: -(-len(flat) // _MOST_COMPLETIONS) or 1]
    if looked_at:
        share = sum(said.is_repetitive() for said in looked_at) / len(looked_at)
        metrics[REPETITIVE] = Metric(value=share, count=len(looked_at))
    same = [all(said.key == first.key for said in rest) for first, *rest in groups if rest]
    if same:
        metrics[IDENTICAL] = Metric(value=sum(same) / len(same), count=len(same))
    read = [p for p in parsed_by if p is not None]
    if read:
        metrics[UNPARSED] = Metric(value=sum(p == "none" for p in read) / len(read), count=len(read))
    if prompts:
        metrics[MOST_COMMON] = _most_common(flat, prompts)
    if rewards:
        metrics[PAID_LENGTH] = _correlation(groups, rewards)
    return metrics


def _most_common(flat: Sequence[Said], prompts: Sequence[Hashable]) -> Metric:
    """The share of the completion that is there most often; None of fewer than four prompts."""
    if len(set(prompts)) < _LEAST_PROMPTS:
        return Metric(value=None, count=0)
    _, most = Counter(said.key for said in flat).most_common(1)[0]
    return Metric(value=most / len(flat), count=len(flat))


def _correlation(groups: Sequence[Sequence[Said]], rewards: Sequence[Sequence[float | None]]) -> Metric:
    """Pearson's correlation of reward and length within groups, over all groups in which both differ."""
    sums, count = [0.0, 0.0, 0.0], 0
    for siblings, totals in zip(groups, rewards, strict=True):
        pairs = [(s.length, total) for s, total in zip(siblings, totals, strict=True) if total is not None]
        lengths, values = [float(n) for n, _ in pairs], [v for _, v in pairs]
        if len(set(lengths)) < 2 or len(set(values)) < 2:
            continue
        middle, mean = fmean(lengths), fmean(values)
        sums[0] += sum((n - middle) * (v - mean) for n, v in zip(lengths, values, strict=True))
        sums[1] += sum((n - middle) ** 2 for n in lengths)
        sums[2] += sum((v - mean) ** 2 for v in values)
        count += len(pairs)
    scale = math.sqrt(sums[1] * sums[2])
    return Metric(value=sums[0] / scale if scale > 0 else None, count=count)
