"""The families of models whose images are understood."""

from __future__ import annotations

from typing import Any

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` in config.json."""


def auto_class(model_type: Any) -> str:
    """Return the class of transformers that loads a policy of this type."""
    return "AutoModelForImageTextToText" if model_type in FAMILIES else "AutoModelForCausalLM"
