"""The families of models whose images are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
"""Values of `model_type` in config.json."""

VLLM_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""vLLM is sent the images of models of these types."""

# Sizes that the publishers of a family leave out, as transformers fills them in.
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    }
}


def image_token_id(config: Mapping[str, Any]) -> int:
    """Return the token that stands for images, as a config.json names it. KeyError where it names none."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


def auto_class(model_type: Any) -> str:
    """Return the class of transformers that loads a policy of this type."""
    return "AutoModelForImageTextToText" if model_type in FAMILIES else "AutoModelForCausalLM"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) and text else config
    return {**_LEFT_OUT.get(str(own.get("model_type")), {}), **own}
