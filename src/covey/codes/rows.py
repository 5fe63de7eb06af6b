"""Codes of rows that have tasks and measured pass rates."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "E346",
        "Rows without a task",
        "The task of a row decides which rewards score it and which metrics it is counted in; a row without "
        "one would be in none.",
    ),
    (
        "E347",
        "Rewards by task that do not fit",
        "Rows that no reward scores teach nothing, and a reward under a wrong name is never called.",
    ),
    (
        "E348",
        "Pass rates that cannot be had",
        "Rows are to be left out or ordered by numbers that nobody knows.",
    ),
    (
        "E349",
        "No row within the pass rates",
        "There is nothing left to train on.",
    ),
    (
        "W127",
        "Pass rates of few rows",
        "A row without a pass rate is kept, and stands in the middle of an order, whatever it is in truth.",
    ),
    (
        "W128",
        "Task without rows",
        "The model is not trained on it, and may lose what it can do there.",
    ),
)
