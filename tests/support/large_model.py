"""A random model of 400 MB in float32 with nine tenths of it in its layers, and runs of it by several ranks
that measure what they hold (held.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from covey.quickstart.task import MODEL_DIR
from support import held
from support.processes import rank_environment

SIZES = {
    "vocab_size": 9600,
    "hidden_size": 1024,
    "intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def save_large(target: Path) -> Path:
    """Write it, with the tokenizer of the built-in model; returns its directory."""
    own = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    ends = {name: own[name] for name in ("eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **ends)).save_pretrained(target)
    for file in MODEL_DIR.iterdir():
        if not (target / file.name).exists():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def large_model_bytes() -> tuple[int, int, int]:
    """Of the whole model, of what is outside of its layers, and of a layer."""
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    return 4 * total, 4 * (total - SIZES["num_hidden_layers"] * layer), 4 * layer


def run_ranks(
    program: Path, runs: Mapping[str, Sequence[str]], folder: Path, ranks: int
) -> list[dict[str, Any]]:
    """Run commands by their names, one after the other, in `ranks` processes of `program`, which is held.py
    or calls it; returns what each rank has measured."""
    (folder / "runs.json").write_text(json.dumps(runs))
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder / "runs.json"), str(folder)],
            env={**os.environ, **own, **held.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=(folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, own in enumerate(rank_environment(ranks))
    ]
    codes = [process.wait(1500) for process in started]
    assert not any(codes), (codes, (folder / "0.log").read_text()[-4000:])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
