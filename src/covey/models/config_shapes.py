"""The tensors of a model from its config.json alone, for families whose layers are known; torch-free.

Names and shapes are those of transformers' modeling files of the family; a test holds the sums to the numbers
of parameters that the models' cards give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.models.adapter_shapes import ModelShapes
from covey.texts import tr

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def config_fault(config: Mapping[str, Any], num_tensors: int) -> str | None:
    """Why a config.json describes no model, or none of `num_tensors` tensors, in words; None where nothing
    shows. Builds nothing, whatever its numbers are."""
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        return tr("config.json does not name a model_type")
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        layers = part.get("num_hidden_layers", part.get("n_layer"))
        if isinstance(layers, int) and layers > num_tensors:
            return tr(
                "config.json has {layers:,} layers, but the files contain {num_tensors:,} tensors in all",
                layers=layers,
                num_tensors=num_tensors,
            )
    return None


def shapes_of_config(config: Mapping[str, Any]) -> ModelShapes | None:
    """Names and shapes of the tensors that a config.json describes; None for another family, or where it
    leaves a width out."""
    family = config.get("model_type")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if family not in FAMILIES or not all(isinstance(config.get(name), int) for name in names):
        return None
    hidden, layers, heads, inner, words = (int(config[name]) for name in names)
    width = config.get("head_dim") or hidden // heads
    query, key = heads * width, (config.get("num_key_value_heads") or heads) * width
    tied = bool(config.get("tie_word_embeddings", False))
    # Qwen 2 has a bias on these three whatever its config.json says; Llama and Qwen 3 by attention_bias.
    biased = {"q_proj", "k_proj", "v_proj"} if family == "qwen2" else set()
    if family in ("llama", "qwen3") and config.get("attention_bias"):
        biased = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if family == "llama" and config.get("mlp_bias"):
        biased |= {"gate_proj", "up_proj", "down_proj"}
    attention = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    layer["post_attention_layernorm.weight"] = (hidden,)
    if family == "qwen3":
        layer |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    for part, linear in (("self_attn", attention), ("mlp", mlp)):
        for name, shape in linear.items():
            layer[f"{part}.{name}.weight"] = shape
            if name in biased:
                layer[f"{part}.{name}.bias"] = shape[:1]
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    tensors["model.norm.weight"] = (hidden,)
    tensors |= {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    if not tied:
        tensors["lm_head.weight"] = (words, hidden)
    return ModelShapes(tensors=tensors, vocab_size=words, tied=tied, family=family)
