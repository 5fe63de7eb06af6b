"""The memory that the plan announces against what a run takes, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from covey.quickstart.task import MODEL_DIR
from journeys.helpers import rows, write_jsonl

CHILD = Path(__file__).parents[1] / "support" / "peak.py"
LEAST, MOST = 0.5, 1.4
"""Bounds of the forecast over what is measured: what a CPU's allocator keeps is counted roughly."""

SMALL, LARGE = 32_768, 151_936
"""Vocabularies of models with 58 and 119 million weights."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A directory for each vocabulary; made when it is first asked for."""
    return _Models(tmp_path_factory.mktemp("models"))


class _Models(dict[int, Path]):
    def __init__(self, place: Path) -> None:
        super().__init__()
        self._place = place

    def __missing__(self, vocabulary: int) -> Path:
        """Random weights with the tokenizer of the built-in model."""
        target = self[vocabulary] = self._place / str(vocabulary)
        own = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
        config = transformers.Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=own["eos_token_id"],
            pad_token_id=own["pad_token_id"],
        )
        torch.manual_seed(0)
        transformers.Qwen2ForCausalLM(config).save_pretrained(target)
        for file in MODEL_DIR.iterdir():
            if not (target / file.name).exists():
                (target / file.name).write_bytes(file.read_bytes())
        return target


def peaks(place: Path, model: Path, **options: Any) -> tuple[int, int]:
    """The peak of the forecast and the measured one, in bytes above the baseline, of two optimizer steps."""
    data = write_jsonl(place / "d.jsonl", rows(8))
    asked = {
        "model": str(model),
        "dataset": [str(data)],
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "torch_dtype": "float32",
        "gradient_checkpointing": "false",
        "learning_rate": 1e-5,
        "max_steps": 2,
        "save_steps": 1000,
        **options,
    }
    (place / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, str(CHILD), str(place / "asked.json"), str(place / "told.json")]
    machine = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=machine)
    assert done.returncode == 0, done.stderr
    told = json.loads((place / "told.json").read_text(encoding="utf-8"))
    return max(told["forecast"].values()), max(told["measured"].values())


def assert_within(found: tuple[int, int]) -> None:
    forecast, measured = found
    assert LEAST <= forecast / measured <= MOST, f"{forecast / 1e6:.0f} MB, measured {measured / 1e6:.0f}"


def test_forecast(tmp_path: Path, models: dict[int, Path]) -> None:
    assert_within(peaks(tmp_path, models[SMALL], max_completion_length=32, save_only_model=True))


LOW, LORA = {"torch_dtype": "bfloat16"}, {"tuner_type": "lora"}
AGAIN, PARTLY = {"gradient_checkpointing": "true"}, {"gradient_checkpointing": "selective"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "length", "options"),
    [
        (SMALL, 256, {}),
        (SMALL, 512, {}),
        (SMALL, 256, LOW),
        (SMALL, 256, AGAIN),
        (SMALL, 256, AGAIN | LOW),
        (SMALL, 256, PARTLY),
        (SMALL, 128, PARTLY | LORA),
        (SMALL, 128, AGAIN | LORA),
        (SMALL, 256, LORA),
        (SMALL, 256, LORA | LOW),
        (SMALL, 128, {"gradient_accumulation_steps": 2}),
        (SMALL, 128, {"beta": 0.04}),
        (SMALL, 128, {"beta": 0.04} | LOW),
        (LARGE, 128, {}),
        (LARGE, 128, LOW),
        (LARGE, 128, LORA),
        (LARGE, 128, LORA | LOW | AGAIN),
        (LARGE, 512, {}),
        (LARGE, 512, LOW),
    ],
    ids=str,
)
def test_forecast_of(
    tmp_path: Path, models: dict[int, Path], vocabulary: int, length: int, options: dict[str, Any]
) -> None:
    assert_within(peaks(tmp_path, models[vocabulary], max_completion_length=length, **options))
