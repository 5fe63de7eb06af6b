"""Each test works in a directory of its own, in a process that no launcher has started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from covey.quickstart import task
from support.verbs import Run, alone

QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "eos_token_id": 314,
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch, tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config.json of 32.8 B parameters and a tokenizer, without weights."""
    (tmp_path / "big").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(task.MODEL_DIR / name, tmp_path / "big" / name)
    (tmp_path / "big" / "config.json").write_text(json.dumps(QWEN_32B), encoding="utf-8")
    return tmp_path / "big"
