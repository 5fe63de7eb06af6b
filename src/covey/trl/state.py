"""Holds the state that callbacks read and the control that they set, under the names of transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass
class TrainerState:
    """Holds how far a run is; `log_history` has one dict for each time that something was logged.

    `total_flos` and `num_input_tokens_seen` are not counted and stay 0.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 10
    eval_steps: float | None = None
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state as JSON."""
        Path(json_path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")


@dataclass
class TrainerControl:
    """Holds what follows: callbacks read and set it."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainOutput(NamedTuple):
    """Holds what `train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
