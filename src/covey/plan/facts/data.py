"""What the checks need to know of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from covey.plan.reasons import DataFault


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingColumn:
    """A column the data set lacks: `MissingColumn(column="solution", needed_by="the reward accuracy")`.

    `rename` is (old name, new name) of a column with which the data was tried and works, or None. `where` is
    the set to evaluate on, "" for the data to train on.
    """

    column: str
    needed_by: str
    rename: tuple[str, str] | None = None
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A data file that is there and cannot be read: `UnreadableFile(path="a.jsonl", words="line 3: no
    JSON")`.

    kind      what is known beyond the words, or ""
    subject   the file that the words begin with, "" where it is none
    within    the words without it, where a place in the file stands before them
    line      the number of the line that is wrong
    encoding  what the text is encoded in, "" where that is not known
    """

    path: str
    words: str
    kind: DataFault = ""
    subject: str = ""
    within: str = ""
    line: int = 0
    encoding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProblem:
    """Why the rows do not make a data set: `DataProblem(words="columns renames 'a' ...", option="columns")`.

    `option` is the one that this is said of; where it is "", it is the one that `source` was typed for.
    `columns` are names of columns, old to new, with which the rows were tried and work, or None.
    """

    words: str
    option: str = ""
    source: str = ""
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubProblem:
    """Why a hub does not give a data set, and whether HF_HUB_OFFLINE says that nobody asks it."""

    name: str
    words: str
    is_offline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows without a usable prompt, by reason: `LeftOut(reason="no_prompt", count=3, rows=(4, 9, 11))`, row
    numbers from 1. `detail` is what stands in the first of them, `role` that of the message which is lost
    there, and `where` the set to evaluate on, "" for the data to train on."""

    reason: str
    count: int
    rows: tuple[int, ...] = ()
    detail: str = ""
    role: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateFacts:
    """What is known of measured pass rates.

    where         the file, run or column that they are of
    digest        a checksum of what was measured; "" for a column, which changes with its data
    num_rows      usable rows
    num_measured  those of them that have a pass rate
    num_kept      those that are used
    histogram     measured rows by tenths of the pass rate
    problem       why there are none, in words
    """

    where: str
    digest: str = ""
    num_rows: int = 0
    num_measured: int = 0
    num_kept: int = 0
    histogram: tuple[int, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set of prompts to evaluate on."""

    name: str
    num_prompts: int
