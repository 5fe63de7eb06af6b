"""The families of models whose images are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
"""Values of `model_type` in config.json."""

VLLM_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Those whose images are sent to vLLM."""


def image_token_id(config: Mapping[str, Any]) -> int:
    """Return the token that stands for images, as a config.json names it. KeyError where it names none."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


def auto_class(model_type: Any) -> str:
    """Return the class of transformers that loads a policy of this type."""
    return "AutoModelForImageTextToText" if model_type in FAMILIES else "AutoModelForCausalLM"
