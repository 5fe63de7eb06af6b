"""Declares the runs of `covey quickstart`: built-in models learn built-in tasks in minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.take import Typed

BUILT_IN_NAMES = ("quickstart", "quickstart-tools", "quickstart-shapes")
"""Names the built-in models and tasks, as `--model` and `--dataset` take them."""

QUICKSTART: dict[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart"],
    "reward_funcs": ["accuracy", "format"],
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 32,
    "temperature": 1.0,
    # At a constant rate the last weights are off by chance: over ten seeds 1e-4 answers 0.79 to 0.85 of the
    # held-out prompts, and 2e-4 that falls to 0 answers 0.87 to 0.91.
    "learning_rate": 2e-4,
    "lr_scheduler_type": "linear",
    "max_steps": 600,
    "save_steps": 200,
}
"""Flags of `covey quickstart` override these; output_dir is runs/quickstart-001, counted up."""


QUICKSTART_TOOLS: dict[str, Any] = {
    "model": "quickstart-tools",
    "dataset": ["quickstart-tools"],
    "tools": ["covey.quickstart.calculator:calculate"],
    "reward_funcs": ["accuracy"],
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    # Two turns and what stands between them have 50 tokens.
    "max_completion_length": 96,
    "temperature": 1.0,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "linear",
    "max_steps": 100,
    "save_steps": 50,
}
"""Sets the options of `covey quickstart --task tools`: the model calls the calculator, then answers."""


QUICKSTART_SHAPES: dict[str, Any] = {
    "model": "quickstart-shapes",
    "dataset": ["quickstart-shapes"],
    "reward_funcs": ["accuracy"],
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 8,
    "temperature": 1.0,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "linear",
    "max_steps": 200,
    "save_steps": 100,
}
"""Sets the options of `covey quickstart --task shapes`: the model looks at drawings and answers."""


QUICKSTARTS: Mapping[str, Mapping[str, Any]] = {
    "sums": QUICKSTART,
    "tools": QUICKSTART_TOOLS,
    "shapes": QUICKSTART_SHAPES,
}
"""Maps the option task of `covey quickstart` to the options of its run."""


def quickstart_typed(typed: Mapping[str, Typed], task: str = "sums") -> dict[str, Typed]:
    """Return what was typed over the quickstart's own values, which have the source "quickstart"."""
    return {name: Typed(value, "quickstart") for name, value in QUICKSTARTS[task].items()} | dict(typed)
