"""Tiny models with random weights, one of each family that the tests speak of."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from covey.models.policy import Policy
from covey.quickstart.task import MODEL_DIR

VOCAB = 320

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 315,
    "bos_token_id": 313,
    "eos_token_id": 314,
}


def config_of(family: str) -> Any:
    """A small configuration of a family; sliding windows are short enough to matter."""
    kv = {**_SIZES, "head_dim": 16}
    match family:
        case "qwen2":
            return transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True)
        case "qwen3":
            return transformers.Qwen3Config(**kv)
        case "llama":
            return transformers.LlamaConfig(**_SIZES)
        case "mistral":
            return transformers.MistralConfig(**kv, sliding_window=7)
        case "gemma2":
            return transformers.Gemma2Config(**kv, sliding_window=7, query_pre_attn_scalar=16)
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=64,
                n_layer=3,
                n_head=4,
                n_positions=512,
                bos_token_id=313,
                eos_token_id=314,
            )
        case "mixtral":
            return transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
        case "lfm2":
            layers = ["conv", "full_attention", "conv"]
            return transformers.Lfm2Config(**_SIZES, layer_types=layers, block_ff_dim=96)
        case "qwen3_5":
            linear = {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            }
            return transformers.Qwen3_5TextConfig(**{**kv, "num_hidden_layers": 4}, **linear)
    raise ValueError(family)


STREAM_FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "mixtral")
LEAKING_FAMILIES = ("lfm2", "qwen3_5")


def random_model(family: str, seed: int = 1, **changes: object) -> PreTrainedModel:
    """A model whose weights are large enough for its attention to be far from uniform."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_changed(family, changes), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model


def _changed(family: str, changes: Mapping[str, object]) -> Any:
    config = config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def policy_of(family: str, **changes: object) -> Policy:
    """A random policy of a family, with other settings of its configuration; no weight is 0 or 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_changed(family, changes), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter, mean=0.7, std=0.3)
    return Policy(model).eval()


def save_model(family: str, directory: Path, seed: int = 1, **changes: object) -> Path:
    """Save a random model with the built-in tokenizer beside it."""
    random_model(family, seed, **changes).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = MODEL_DIR / name
        if source.is_file():
            (directory / name).write_bytes(source.read_bytes())
    return directory


def save_padded(directory: Path) -> Path:
    """Write the built-in model with a padded vocabulary: its 64 ids from 320 on are likely, and the
    tokenizer has none of them."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    model.resize_token_embeddings(384, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[320:] = 60 * model.get_input_embeddings().weight[:64]
    shutil.copytree(MODEL_DIR, directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory)
    return directory
