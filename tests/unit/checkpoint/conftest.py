"""A small checkpoint to read, damage and delete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from covey.checkpoint.registry import State
from covey.checkpoint.write import write_checkpoint

STATES = {
    "cursor": State(json={"epoch": 1, "third": 1 / 3}),
    "optimizer": State(json={"step": 4}, tensors={"moment": torch.arange(6, dtype=torch.float32)}),
    "rng/0": State(tensors={"bits": torch.arange(16, dtype=torch.uint8)}),
}


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 4)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def make(step: int, trainer: bool = True) -> Path:
        states = STATES if trainer else None
        return write_checkpoint(
            tmp_path, step=step, write_model=write_model, states=states, meta={"covey": "test"}
        )

    return make
