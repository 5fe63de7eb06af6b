"""Holds the facts that checks read of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Holds the facts of measured pass rates.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Holds the facts of the data sets.

    num_rows              rows of the data files
    columns               names of the columns
    made_columns          those of them that reading the rows made, such as a gold out of a conversation
    missing_columns       columns that the prompt or a reward needs and that are not there
    missing_paths         paths that do not exist
    unreadable            files that exist and cannot be read
    media_columns         columns with images, audio or video that the model does not take
    sees_images           whether the model takes images
    unread_columns        columns with bytes, which rewards are not given
    unused_columns        columns that a `prompt` string has no place for, such as a system message
    has_preference_pairs  whether the rows are pairs of answers without what GRPO needs
    left_out              rows without a usable prompt
    pass_rates            what is known of measured pass rates
    notes                 what was read in another way than asked, in words
    problem               why the rows do not make a data set: mixing, columns, splitting
    hub_problem           why a hub does not give a data set
    eval_sets             the sets of prompts to evaluate on
    """

    num_rows: int | None = None
    columns: tuple[str, ...] | None = None
    made_columns: tuple[str, ...] = ()
    missing_columns: tuple[MissingColumn, ...] | None = None
    missing_paths: tuple[str, ...] | None = None
    unreadable: tuple[UnreadableFile, ...] | None = None
    media_columns: tuple[str, ...] = ()
    sees_images: bool = False
    unread_columns: tuple[str, ...] = ()
    unused_columns: tuple[str, ...] = ()
    has_preference_pairs: bool = False
    left_out: tuple[LeftOut, ...] = ()
    pass_rates: PassRateFacts | None = None
    notes: tuple[str, ...] = ()
    problem: DataProblem | None = None
    hub_problem: HubProblem | None = None
    eval_sets: tuple[EvalSet, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """Holds the facts of the prompts to train on.

    num_used         rows that are used: those with a prompt that is not too long
    num_too_long     rows left out because their prompt is too long
    longest          longest prompt among the rows that are used
    longest_in_data  the same over all rows, before any is left out
    first            the first rendered prompt
    are_text         whether prompts are strings that no template has been put around
    mention_format   whether a prompt speaks of the tags that the reward format pays for
    has_images       whether a prompt has an image; None where only some are known
    num_images       images of all prompts
    most_patches     the most patches of a prompt
    image_tokens     the fewest and the most tokens of an image
    """

    num_used: int | None = None
    num_too_long: int | None = None
    longest: int | None = None
    longest_in_data: int | None = None
    first: str | None = None
    are_text: bool | None = None
    mention_format: bool | None = None
    has_images: bool | None = None
    num_images: int = 0
    most_patches: int = 0
    image_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Holds the facts of the tasks that rows name.

    num_rows      rows that are used of each task
    evaluated     tasks of the sets to evaluate on
    without       rows that name no task, as reason the set to evaluate on or ""
    column_guess  a column that names a task in every row, where the typed one names none
    """

    num_rows: Mapping[str, int] = field(default_factory=dict)
    evaluated: tuple[str, ...] = ()
    without: tuple[LeftOut, ...] = ()
    column_guess: str | None = None
