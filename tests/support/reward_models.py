"""Tiny reward models with random weights and the tokenizer of the built-in model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from covey.quickstart.task import MODEL_DIR
from support.models import config_of

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def write_reward_model(directory: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """A sequence classifier with one label in a directory of its own."""
    config = config_of(family)
    config.num_labels = 1
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        # As it is drawn the head gives differences of a hundredth.
        model.score.weight *= 30
    model.save_pretrained(directory)
    for name in _TOKENIZER:
        if (MODEL_DIR / name).is_file():
            shutil.copy(MODEL_DIR / name, directory / name)
    return directory
