"""The codes of the tasks that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E346",
        title="Rows without a task",
        why="The task of a row decides which rewards score it and in which metrics it is counted; a "
        "row without a task would be left out of both.",
    ),
    Code(
        code="E347",
        title="Task rewards that do not match the tasks",
        why="Rows that no reward scores teach nothing, and a reward under a wrong task name is never used.",
    ),
    Code(
        code="W128",
        title="Task without rows",
        why="The model is not trained on this task and may get worse at it.",
    ),
)
