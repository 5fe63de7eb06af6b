"""One thread, tiny random models of several families, and a comparison that can fail."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from covey.models import flash
from covey.token_streams import Row
from support import rows
from support.attention import varlen
from support.models import save_model
from support.rows import VOCAB

WINDOW = 7

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _config(family: str) -> Any:
    t = transformers
    match family:
        case "qwen2":
            return t.Qwen2Config(tie_word_embeddings=True, **_SIZES)
        case "qwen3":
            return t.Qwen3Config(head_dim=8, **_SIZES)
        case "llama":
            return t.LlamaConfig(**_SIZES)
        case "mistral":
            return t.MistralConfig(head_dim=8, sliding_window=WINDOW, **_SIZES)
        case "gemma2":
            return t.Gemma2Config(
                head_dim=8,
                sliding_window=WINDOW,
                query_pre_attn_scalar=8,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=1.0,
                **_SIZES,
            )
        case "gpt2":
            return t.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=128,
                bos_token_id=1,
                eos_token_id=2,
            )
        case "mixtral":
            return t.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_SIZES)
        case "qwen3_moe":
            return t.Qwen3MoeConfig(
                head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **_SIZES
            )
        case "gpt_oss":
            return t.GptOssConfig(
                head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, **_SIZES
            )
        case "cohere":
            return t.CohereConfig(logit_scale=0.25, **_SIZES)
        case "granite":
            return t.GraniteConfig(logits_scaling=4.0, attention_multiplier=0.5, **_SIZES)
        case "lfm2":
            sizes = {**_SIZES, "num_hidden_layers": 4}
            kinds = ["conv", "full_attention", "conv", "full_attention"]
            return t.Lfm2Config(layer_types=kinds, block_ff_dim=48, **sizes)
        case "qwen3_5":
            return t.Qwen3_5TextConfig(head_dim=8, **_LINEAR, **{**_SIZES, "num_hidden_layers": 4})
    raise KeyError(family)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[[str], Any]:
    """A family's config at a size that runs in milliseconds; sliding windows are shorter than the rows."""
    return _config


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """A new model of a family; weights are large enough for a leak between rows to show in the outputs."""

    def make(family: str, seed: int = 1) -> Any:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.05)
        return model

    return make


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's random model, made when it is first asked for."""
    made: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in made:
            made[family] = save_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return base


@pytest.fixture(scope="session")
def random_rows() -> Callable[..., list[Row]]:
    """`support.rows.random_rows`."""
    return rows.random_rows


@pytest.fixture
def flash_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for the package flash-attn; the list has the queries of each call."""
    calls: list[int] = []

    def counted(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
        calls.append(len(tensors[0]))
        return varlen(*tensors, **settings)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = counted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float32,))
    return calls
