"""What a reward is: a function over the completions of a rollout, and how it is called.

A function has TRL's form, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, keyword
arguments only, and is given what it names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.types import Prompt, ScorePart, Status, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One completion as a reward sees it."""

    prompt: Prompt
    trajectory: Trajectory


class Reward(Protocol):
    """Scores completions; a failure is a status on its rows, never a number."""

    name: str

    def score(self, rows: Sequence[Scored]) -> list[ScorePart]: ...


class FunctionReward:
    """A reward function in this process."""

    def __init__(self, name: str, function: Callable[..., Sequence[float | None]]) -> None:
        self.name = name
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}

    def score(self, rows: Sequence[Scored]) -> list[ScorePart]:
        """One part a row; an exception or a wrong number of values marks every row of the call as failed."""
        try:
            values = list(self._function(**self._arguments(rows)))
        except Exception as error:  # noqa: BLE001 - a reward is somebody's code: whatever it raises is its result
            return self._failed(len(rows), f"{type(error).__name__}: {error}")
        if len(values) != len(rows):
            return self._failed(len(rows), f"gave {len(values)} values for {len(rows)} completions")
        return [self._part(value) for value in values]

    def _arguments(self, rows: Sequence[Scored]) -> Mapping[str, Any]:
        arguments: dict[str, Any] = {
            "prompts": [r.prompt.text for r in rows],
            "completions": [r.trajectory.text for r in rows],
            "completion_ids": [list(r.trajectory.completion_ids) for r in rows],
        }
        columns = {name for r in rows for name in r.prompt.columns} - arguments.keys()
        arguments.update({name: [r.prompt.columns.get(name) for r in rows] for name in sorted(columns)})
        return {k: v for k, v in arguments.items() if self._takes_all or k in self._takes}

    def _part(self, value: float | None) -> ScorePart:
        if value is None:
            return ScorePart(name=self.name, value=None)
        try:
            number = float(value)
        except (TypeError, ValueError):
            return self._invalid(
                f"gave a {type(value).__name__} where a number or None is due: {value!r:.80}"
            )
        if not math.isfinite(number):
            return self._invalid(f"gave {number} for this row")
        return ScorePart(name=self.name, value=number)

    def _invalid(self, message: str) -> ScorePart:
        return ScorePart(name=self.name, value=None, status=Status.INVALID, message=message)

    def _failed(self, count: int, message: str) -> list[ScorePart]:
        return [ScorePart(name=self.name, value=None, status=Status.ERROR, message=message)] * count
