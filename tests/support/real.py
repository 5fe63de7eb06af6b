"""Real tokenizers and a real small model, fetched by `make real-models`, and random models around them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.needs import lacks

NAMES = ("smollm2", "qwen3", "llama3_1", "gemma3")
ROOT = Path(os.environ.get("COVEY_REAL", Path(__file__).parents[2] / ".real"))
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def real(name: str) -> Path:
    """The directory of one of NAMES, a model or a tokenizer; skips where it was not fetched."""
    path = ROOT / name if name == "smollm2" else ROOT / "tok" / name
    if not path.is_dir():
        lacks("a registry", f"`make real-models` has not fetched {name}")
    return path


def around(name: str, target: Path, rows: int | None = None) -> Path:
    """A random model of two layers of the family that a real tokenizer is of, with that tokenizer beside it.

    Its embedding has as many rows as there are tokens, or `rows`. config.json and generation_config.json hold
    the end tokens that the publishers of the family give.
    """
    source = real(name)
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    sizes = {**_SIZES, "vocab_size": rows or len(tokenizer)}
    ids = tokenizer.convert_tokens_to_ids
    match name:
        case "qwen3":
            config = transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
            ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
        case "llama3_1":
            config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
            ends = [128_001, 128_008, 128_009]
        case "gemma3":
            config = transformers.Gemma3TextConfig(
                **sizes, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
            )
            ends = [ids("<eos>"), ids("<end_of_turn>")]
        case _:
            raise ValueError(name)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = ends, ends[0], tokenizer.bos_token_id
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[0], top_k=64, top_p=0.95, do_sample=True
    )
    model.save_pretrained(target)
    return target
