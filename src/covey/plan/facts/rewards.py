"""What the checks need to know of the rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from covey.types import RewardCause

RewardFault = Literal["unknown", "load", "signature", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyReward:
    """A reward that cannot be used: `FaultyReward(name="mine.py:f", kind="load", words="...")`.

    cause       what is known beyond the kind, or ""
    subject     the name that the words begin with, which may be the reward's; "" where it is none
    near        the name nearest to one that is not there
    lacking     the arguments that nothing gives
    row         the row of a trial, and `completion` what answered it there
    said        what the reward said of that row, or what was said of its answer
    """

    name: str
    kind: RewardFault
    words: str
    cause: RewardCause = ""
    subject: str = ""
    near: str = ""
    lacking: tuple[str, ...] = ()
    row: int | None = None
    completion: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindReward:
    """A reward ("": the weighted total) that does not tell the gold answers of `column` from what they are
    compared with: on all but `num_told_apart` of `num_rows` rows it gives them no more. `constant` is the one
    value that it gives, or None, and `form` the form of the gold of which that holds, "" for all."""

    name: str
    column: str
    compared: Literal["empty", "others"]
    num_rows: int
    num_told_apart: int
    constant: float | None = None
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFacts:
    """What the gold answers are: how many were read, how many were not, and the first of those as (row
    number from 1, text, reason)."""

    num_checked: int
    num_bad: int
    examples: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFacts:
    """How programs of completions are shut off here: the layers that lack, none where they may run, why
    each way that was tried is not open, and whether bubblewrap is installed."""

    lacks: tuple[str, ...] = ()
    is_installed: bool = True
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """A reward model as it was typed, and what its files say of it.

    name          the name of its metric
    directory     where its files lie, "" where they cannot be had
    problem       why its logit is no reward, and `fault` what kind of thing it is instead; or None
    parameters    weights
    file_bytes    bytes of the files that hold them
    hidden        width of a layer's output, and `intermediate` that of its MLP
    context       positions, None where nobody says
    has_template  whether it brings a chat template
    is_here       whether its weights are on this machine
    """

    entry: str
    name: str
    directory: str = ""
    problem: str | None = None
    fault: str = ""
    parameters: int = 0
    file_bytes: int = 0
    hidden: int = 0
    intermediate: int = 0
    context: int | None = None
    has_template: bool = False
    is_here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFacts:
    """What is wrong with what the reward judge is told, in words: its prompt and its pattern; and the names
    in the prompt that nothing has a value for."""

    prompt_problem: str | None = None
    regex_problem: str | None = None
    unknown: tuple[str, ...] = ()
