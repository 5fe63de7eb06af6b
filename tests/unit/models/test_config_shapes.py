"""The tensors of a model by its config.json: those that its weights have, and as many as its card says."""

from typing import Any

import pytest

from covey.data.model_files import read_json
from covey.models.adapter_shapes import LoraSettings, facts_of, read_shapes
from covey.models.config_shapes import shapes_of_config
from covey.quickstart import task


def described(family: str, hidden: int, layers: int, heads: int, keys: int, inner: int, words: int) -> Any:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": words,
    }


QWEN_7B = described("qwen2", 3584, 28, 28, 4, 18944, 152064)


def parameters(config: dict[str, Any]) -> int:
    shapes = shapes_of_config(config)
    assert shapes is not None
    return facts_of(shapes, LoraSettings(rank=8, alpha=16.0)).num_base


@pytest.mark.parametrize(
    ("config", "number"),
    [
        # Counts of the weight files that the models are published with.
        (QWEN_7B, 7_615_616_512),
        (described("qwen2", 5120, 64, 40, 8, 27648, 152064), 32_763_876_352),
        (described("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
        (described("mistral", 4096, 32, 32, 8, 14336, 32000), 7_241_732_096),
        ({**described("qwen3", 4096, 36, 32, 8, 12288, 151936), "head_dim": 128}, 8_190_735_360),
        (
            {**described("qwen2", 896, 24, 14, 2, 4864, 151936), "tie_word_embeddings": True},
            494_032_768,
        ),
    ],
)
def test_published_counts(config: dict[str, Any], number: int) -> None:
    assert parameters(config) == number


def test_what_the_weights_have() -> None:
    directory = task.MODEL_DIR
    assert shapes_of_config(read_json(directory / "config.json")) == read_shapes(directory)


def test_biases_of_attention_and_mlp() -> None:
    small = described("llama", 8, 1, 2, 1, 16, 32)
    attention = parameters({**small, "attention_bias": True}) - parameters(small)
    assert attention == 8 + 4 + 4 + 8
    assert parameters({**small, "mlp_bias": True}) - parameters(small) == 16 + 16 + 8


@pytest.mark.parametrize("changes", [{"model_type": "gemma2"}, {"hidden_size": None}, {"vocab_size": None}])
def test_what_is_not_known(changes: dict[str, Any]) -> None:
    assert shapes_of_config({**QWEN_7B, **changes}) is None
