"""The built-in rewards by name, and the weighted total over several."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from covey.rewards.accuracy import accuracy
from covey.rewards.protocol import FunctionReward, Reward, Scored
from covey.types import Score, ScorePart, Status

_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)


def format_reward(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is `<think>…</think><answer>…</answer>`, each tag once and nothing around them;
    else 0."""
    return [float(_FORMAT.fullmatch(text) is not None) for text in completions]


def _built_in() -> dict[str, Callable[..., list[float | None]]]:
    return {"accuracy": accuracy, "format": format_reward}


def available() -> tuple[str, ...]:
    """Names that `--reward_funcs` takes."""
    return tuple(sorted(_built_in()))


def build(names: Sequence[str]) -> list[Reward]:
    """The rewards of these names, in order; an unknown name is a KeyError, found earlier by the plan."""
    functions = _built_in()
    return [FunctionReward(name, functions[name]) for name in names]


def score_rows(rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Scored]) -> list[Score]:
    """One score a row: the weighted sum of the parts that spoke.

    A part that failed makes the row invalid: it is left out of its group's statistics, and is not a 0.
    """
    if not rows:
        return []
    columns = [reward.score(rows) for reward in rewards]
    return [total(parts, weights) for parts in zip(*columns, strict=True)]


def total(parts: Sequence[ScorePart], weights: Sequence[float]) -> Score:
    """Combine the parts of one row; total None where no reward spoke or one failed."""
    failed = next((p for p in parts if p.status is not Status.OK), None)
    if failed is not None:
        message = f"{failed.name}: {failed.message}"
        return Score(total=None, parts=tuple(parts), status=failed.status, message=message)
    pairs: list[tuple[float, Any]] = [
        (weight, part.value) for weight, part in zip(weights, parts, strict=True) if part.value is not None
    ]
    if not pairs:
        return Score(total=None, parts=tuple(parts))
    return Score(total=sum(weight * value for weight, value in pairs), parts=tuple(parts))
