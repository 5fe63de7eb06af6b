"""Where rewards look for the right answer, and what can be wrong with a reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GOLD_COLUMNS = ("solution", "answer")
"""The columns in which covey's own rewards look for the right answer, in this order."""
GOLD_NAMES = (*GOLD_COLUMNS, "ground_truth", "gold", "label", "target", "reference")
"""The names by which a column of any data set holds the right answer, those of covey's own rewards first."""

GOLD_KEYS = ("target", "ground_truth", "answer", "value")
"""The keys under which an object in a gold column holds the right answer, in this order."""

FaultKind = Literal["unknown", "twice", "import", "missing", "not_callable", "signature", "trial"]
RewardCause = Literal[
    "",
    "bare_file",
    "no_file",
    "no_python",
    "no_module",
    "import",
    "unmade",
    "num_values",
    "num_steps",
    "no_number",
    "no_step_number",
    "not_finite",
    "judge",
    "verdict",
]
"""Why a reward cannot be used or failed, where more is known than its words.

bare_file       a file without the name of a function
no_file         a file that is not there
no_module       an import of a module that is not there
import          code that raises while it is imported
unmade          a class of which no object can be made
num_values      another number of values than of completions
num_steps       another number of values than of steps
no_number       something else than a number, or than a list of them
no_step_number  the same of a step
not_finite      nan or an infinity
judge           a service that gave no answer
verdict         an answer of it without a reward
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFault:
    """Why a reward cannot be used: `RewardFault(reward="r.py:f", kind="missing", words="r.py has no f")`.

    cause       what is known beyond the kind, or ""
    subject     the name that the words begin with, which may be the reward's; "" where it is none
    near        the name nearest to one that is not there
    lacking     the arguments that nothing gives
    row         the row of a trial, counted from 1, and `completion` what answered it there
    said        what the reward said of that row, or what was said of its answer
    form        the other form of completions in which all rewards pass their trial; "" where none was found
    """

    reward: str
    kind: FaultKind
    words: str
    cause: RewardCause = ""
    subject: str = ""
    near: str = ""
    lacking: tuple[str, ...] = ()
    row: int | None = None
    completion: str = ""
    said: str = ""
    form: Literal["", "text", "messages"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindReward:
    """A reward ("": the weighted total) that does not tell the gold answers of `column` from what they are
    compared with: on all but `num_told_apart` of `num_rows` rows it gives them no more. `constant` is the one
    value that it gives, or None, and `form` the form of the gold of which that holds, "" for all."""

    reward: str
    column: str
    compared: Literal["empty", "others"]
    num_rows: int
    num_told_apart: int
    constant: float | None = None
    form: str = ""
