"""What a reward receives, what it returns, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from covey.rewards.steps import steps_of
from covey.types import Metric, Prompt, ScorePart, Trajectory

Form = Literal["text", "messages"]
FaultKind = Literal["unknown", "twice", "import", "missing", "not_callable", "signature", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One completion as a reward receives it."""

    prompt: Prompt
    trajectory: Trajectory

    @property
    def text(self) -> str:
        """The assistant's turn as a reader would see it: what the prompt opened, then what was sampled."""
        return self.prompt.opened + self.trajectory.text

    def steps(self, separator: str) -> list[str]:
        """The text in steps; what the prompt opened is of the first."""
        pieces = steps_of(self.trajectory.text, separator)
        return [self.prompt.opened + pieces[0], *pieces[1:]] if pieces else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the run is, for rewards that change with it (`trainer_state`)."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFault:
    """Why a reward cannot be used: `RewardFault(reward="r.py:f", kind="missing", words="r.py has no f")`."""

    reward: str
    kind: FaultKind
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWord:
    """One reward's result for one row, and what it noted beside it (`log_extra`)."""

    part: ScorePart
    extras: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One reward's results for some rows; `metrics` has one value per call that gave one (`log_metric`)."""

    rows: tuple[RowWord, ...]
    metrics: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """One row: a part per reward, in the order of the rewards, and what they noted of it, JSON by name."""

    parts: tuple[ScorePart, ...]
    extras: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The results of all rewards for some rows; metrics are means over the calls that logged them."""

    rows: tuple[JudgedRow, ...]
    metrics: Mapping[str, Metric]


class Reward(Protocol):
    """Scores completions; a failure is a status on its rows, never a number.

    One that `is_here` computes in this process, while it is waited for.
    """

    name: str
    is_here: bool

    def begin(self, rows: Sequence[Scored], state: TrainerState) -> Callable[[], Judgement]:
        """Start scoring; the function that comes back waits for the judgement and returns it."""
        ...

    def named(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Those of these columns that the function names among its arguments."""
        ...

    def lacks(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Arguments that the function demands and that neither covey nor these columns give."""
        ...
