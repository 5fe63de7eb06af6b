"""Codes of rows that have tasks and measured pass rates."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "E346",
        "Rows without a task",
        "The task of a row decides which rewards score it and in which metrics it is counted; a row "
        "without a task would be left out of both.",
    ),
    (
        "E347",
        "Task rewards that do not match the tasks",
        "Rows that no reward scores teach nothing, and a reward under a wrong task name is never used.",
    ),
    (
        "E348",
        "Pass rates that are not available",
        "Filtering and ordering by pass rate need measured pass rates before the run starts.",
    ),
    (
        "E349",
        "No row within the pass rates",
        "There is nothing left to train on.",
    ),
    (
        "W127",
        "Few rows have pass rates",
        "A row without a pass rate is kept and placed in the middle of the order, whatever its true pass "
        "rate is.",
    ),
    (
        "W128",
        "Task without rows",
        "The model is not trained on this task and may get worse at it.",
    ),
    (
        "W129",
        "Some gold lists may be parts of one answer",
        "The lists are read as alternatives. If such a list holds the parts of one answer, a completion "
        "that gives only one part is rewarded as right.",
    ),
)
