"""The built-in rewards by name, and the weighted total over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.rewards.builtin import BUILT_IN, IN_WORKERS, JUDGE, JUDGE_OPTIONS, built_in_name
from covey.rewards.protocol import Judged, Scored, TrainerState
from covey.rewards.resolve import built_in, names_of
from covey.rewards.reward_set import RewardSet
from covey.rewards.targets import is_model, model_name, model_source, target_of
from covey.types import Score, ScorePart, Status, StepSpans


def available() -> tuple[str, ...]:
    """Names that `--reward_funcs` takes without a file of the user's."""
    return tuple(sorted({*BUILT_IN, *IN_WORKERS, JUDGE}))


def options_read() -> dict[str, tuple[str, ...]]:
    """The options of a run that each of them reads."""
    read = {name: BUILT_IN[name].options if name in BUILT_IN else () for name in available()}
    return {**read, JUDGE: JUDGE_OPTIONS}


def metric_names(entries: Sequence[str]) -> tuple[str, ...]:
    """The names under which the scores of entries are recorded, told without loading them."""
    return names_of([_called(entry) for entry in entries])


def _called(entry: str) -> tuple[str, str | None]:
    plain, target = built_in_name(entry), target_of(entry)
    if plain is None and target is not None:
        return target.metric, target.source
    if plain is None and is_model(entry):
        return model_name(entry), model_source(entry)
    return plain or entry, None


def build(names: Sequence[str], options: Mapping[str, Any] | None = None) -> RewardSet:
    """The built-ins of these names, in order, in this process; an unknown name is a KeyError, and so is an
    option that one of them reads and that is not given."""
    resolved = [built_in(name, options or {}) for name in names]
    return RewardSet([f.reward(n, None) for f, n in zip(resolved, metric_names(names), strict=True)])


def weighted(
    judged: Judged, weights: Sequence[float], ends: Callable[[int], tuple[int, ...]] = lambda row: ()
) -> list[Score]:
    """One score a row: the weighted sum of the parts with a value, and what rewards noted of the row.

    `ends` says how many of a row's tokens end each of its steps, where a reward gave one number for each.
    """
    return [
        replace(total(row.parts, weights, ends(i) if gives_steps(row.parts) else ()), extras=row.extras)
        for i, row in enumerate(judged.rows)
    ]


def gives_steps(parts: Sequence[ScorePart]) -> bool:
    """Whether a reward gave one number per step."""
    return any(part.steps is not None for part in parts)


def score_rows(rewards: RewardSet, weights: Sequence[float], rows: Sequence[Scored]) -> list[Score]:
    """`weighted` over rows that belong to no step of a run."""
    return weighted(rewards.score(rows, TrainerState()), weights)


def total(parts: Sequence[ScorePart], weights: Sequence[float], ends: tuple[int, ...] = ()) -> Score:
    """Combine the parts of one row; the total is None where no reward gave a value or one failed.

    A part that failed makes the row invalid: it is left out of its group's statistics, and is not a 0. Of a
    part with one number per step its mean enters the total; `ends` are the tokens that end its steps.
    """
    failed = next((p for p in parts if p.status is not Status.OK), None)
    if failed is not None:
        message = f"{failed.name}: {failed.message}"
        return Score(total=None, parts=tuple(parts), status=failed.status, message=message)
    steps = None
    if gives_steps(parts):
        outcomes = [p for p in zip(weights, parts, strict=True) if p[1].steps is None]
        steps = StepSpans(ends=ends, weights=tuple(weights), outcome=_sum(outcomes))
    return Score(total=_sum(list(zip(weights, parts, strict=True))), parts=tuple(parts), steps=steps)


def _sum(weighed: Sequence[tuple[float, ScorePart]]) -> float | None:
    values = [weight * part.value for weight, part in weighed if part.value is not None]
    return sum(values) if values else None
