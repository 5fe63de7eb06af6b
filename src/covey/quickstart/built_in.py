"""The built-in models and tasks, by the name that `--model` and `--dataset` take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.quickstart import shapes_task, task, tools_task


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A built-in task: the folder of its model, and its rows to train and to evaluate on. Misleading rows
    have another picture than the one that their answer is of."""

    model_dir: Path
    training_rows: Callable[[], list[dict[str, Any]]]
    held_out_rows: Callable[[], list[dict[str, Any]]]
    misleading_rows: Callable[[], list[dict[str, Any]]] | None = None


BUILT_IN: Mapping[str, BuiltIn] = {
    "quickstart": BuiltIn(
        model_dir=task.MODEL_DIR,
        training_rows=task.training_rows,
        held_out_rows=task.held_out_rows,
    ),
    "quickstart-tools": BuiltIn(
        model_dir=tools_task.MODEL_DIR,
        training_rows=tools_task.training_rows,
        held_out_rows=tools_task.held_out_rows,
    ),
    "quickstart-shapes": BuiltIn(
        model_dir=shapes_task.MODEL_DIR,
        training_rows=shapes_task.training_rows,
        held_out_rows=shapes_task.held_out_rows,
        misleading_rows=shapes_task.permuted_rows,
    ),
}
"""The names are `covey.config.quickstart.BUILT_IN_NAMES`."""


def directory_of(model: str) -> Path:
    """Return the folder of a built-in model, or the path that any other name is."""
    return BUILT_IN[model].model_dir if model in BUILT_IN else Path(model)
