"""The completions of a run whose log says nothing of them, from its rollout files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.health.completions import Said, completion_metrics
from covey.health.history import number
from covey.telemetry.rollouts import list_rollouts, read_rollout, without_unfinished
from covey.texts import tr
from covey.types import Metric

_FIRST, _LAST = 3, 5


def examine(directory: Path, notes: list[str]) -> dict[int, dict[str, Metric]]:
    """Metrics of the first three and the newest five rollouts, by the number of the rollout.

    All of them may be many gigabytes. A rollout that cannot be read is a note; the newest one is left out
    where the run has not written all of its files.
    """
    rollouts = without_unfinished(list_rollouts(directory))
    numbers = list(rollouts)
    chosen = sorted({*numbers[:_FIRST], *numbers[-_LAST:]})
    by_rollout = {}
    for rollout in chosen:
        try:
            records = read_rollout(rollouts[rollout])
            by_rollout[rollout] = _metrics(records)
        except CoveyError as error:
            notes.append(str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(tr("rollout {number} cannot be read: {error}", number=rollout, error=error))
    if not numbers:
        notes.append(tr("no rollouts were recorded, so completions were not examined"))
    return by_rollout


def _metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    groups: dict[Any, list[Said]] = {}
    rewards: dict[Any, list[float | None]] = {}
    prompts: dict[Any, Any] = {}
    for record in records:
        group = record["group"]
        pairs = zip(record["completion_ids"], record["trained_mask"], strict=True)
        groups.setdefault(group, []).append(Said.of([token for token, trained in pairs if trained]))
        rewards.setdefault(group, []).append(number(record.get("reward")))
        prompts[group] = record.get("prompt_id", group)
    parsed = [(record.get("extras") or {}).get("parsed_by") for record in records]
    metrics = completion_metrics(
        list(groups.values()), parsed, list(prompts.values()), list(rewards.values())
    )
    return {name: metric for name, metric in metrics.items() if metric.value is not None}
