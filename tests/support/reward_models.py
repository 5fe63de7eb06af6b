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


def write_lover_of(token: int, directory: Path) -> Path:
    """A reward model that pays for the share of one token in the conversation, by hand.

    Its one layer attends to all tokens alike and passes their embeddings on: one axis for the token, another
    for all others; the MLP adds nothing, and the head reads the first axis.
    """
    write_reward_model(directory, num_hidden_layers=1, num_key_value_heads=4)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    layer = model.model.layers[0]
    with torch.no_grad():
        for weights in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.down_proj):
            weights.weight.zero_()
        for weights in (layer.self_attn.v_proj, layer.self_attn.o_proj):
            weights.weight.copy_(torch.eye(64))
        embedding = model.model.embed_tokens.weight
        embedding.zero_()
        embedding[:, 1] = 1.0
        embedding[token] = torch.eye(64)[0]
        model.score.weight.zero_()
        model.score.weight[0, 0] = 1.0
    model.save_pretrained(directory)
    return directory


def plain_reward(directory: Path, conversation: Any) -> float:
    """The logit of one row by a plain forward pass of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    text = conversation
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])
