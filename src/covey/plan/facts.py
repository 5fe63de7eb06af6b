"""What the checks need to know of the machine, the model and the data; gathered elsewhere, so that checks
stay pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

OutputDirState = Literal["free", "run", "not_empty", "not_writable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingColumn:
    """A column the data set lacks: `MissingColumn(column="solution", needed_by="the reward accuracy")`."""

    column: str
    needed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A data file that is there and cannot be read: `UnreadableFile(path="a.jsonl", words="line 3: no
    JSON")`."""

    path: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFacts:
    """What was found where a resume was asked for.

    `problem` says why it is no checkpoint to go on from, or is None; `step` is the checkpoint's;
    `config_changes` are the options that differ from those of the stopped run as (name, old value, new
    value).
    """

    path: str
    problem: str | None = None
    step: int | None = None
    config_changes: tuple[tuple[str, Any, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known; None means that it is not known, and a check that needs it is silent. Lengths are
    tokens.

    num_processes          training processes over all machines
    num_rows               rows of the data files
    num_prompts            rows that are used: those with a prompt that is not too long
    num_prompts_too_long   rows left out because their prompt is too long
    longest_prompt         longest prompt among the rows that are used
    longest_prompt_in_data the same over all rows, before any is left out
    columns                names of the data set's columns
    missing_columns        columns that the prompt or a reward needs and that are not there
    dataset_missing        paths that do not exist
    dataset_unreadable     files that exist and cannot be read
    model_problem          why the model cannot be read; None where it can be, or where nobody looked
    model_context          positions of the model
    rewards_available      every name that `reward_funcs` may hold
    checkpoint_bytes       size of one checkpoint with everything a resume needs
    free_disk_bytes        free space where output_dir lies
    cuda                   whether training uses CUDA
    nproc_available        GPUs with CUDA, else cores of this machine
    """

    num_processes: int = 1
    num_rows: int | None = None
    num_prompts: int | None = None
    num_prompts_too_long: int | None = None
    longest_prompt: int | None = None
    longest_prompt_in_data: int | None = None
    columns: tuple[str, ...] | None = None
    missing_columns: tuple[MissingColumn, ...] | None = None
    dataset_missing: tuple[str, ...] | None = None
    dataset_unreadable: tuple[UnreadableFile, ...] | None = None
    model_problem: str | None = None
    model_context: int | None = None
    output_dir_state: OutputDirState | None = None
    resume: ResumeFacts | None = None
    replay_problem: str | None = None
    rewards_available: tuple[str, ...] | None = None
    checkpoint_bytes: int | None = None
    free_disk_bytes: int | None = None
    cuda: bool | None = None
    nproc_available: int | None = None
