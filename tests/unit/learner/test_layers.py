"""Two layers of each kind stand for a whole model in the probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from covey.learner.sharding.layers import decoder_layers, layout_of_layers, pairs_of_layers
from covey.models.policy import Policy, RowLayout, narrowest
from covey.models.probe import widest_stream
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, VOCAB, random_model
from support.vision import FAMILIES, config_of

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _by_layers(policy: Policy) -> RowLayout:
    found = []
    for pair in pairs_of_layers(policy):
        policy.use_stream("padded")
        found.append(layout_of_layers(policy, pair, "sdpa"))
    policy.use_stream("padded")
    return narrowest(found)


@pytest.mark.parametrize("family", [*STREAM_FAMILIES, *LEAKING_FAMILIES])
def test_the_verdict_is_that_of_the_whole_model(family: str) -> None:
    policy = Policy(random_model(family), stream="padded").eval()
    config = policy.model.config.to_dict()
    stream, shares_prompts, _ = widest_stream(policy)
    found = _by_layers(policy)
    assert (found.stream, found.shares_prompts) == (stream, shares_prompts)
    assert policy.model.config.to_dict() == config


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (transformers.Qwen3Config(**_SIZES, head_dim=16, num_hidden_layers=6), [0]),
        (transformers.Gemma2Config(**_SIZES, head_dim=16, num_hidden_layers=4, sliding_window=7), [0, 1]),
        (
            transformers.Gemma3TextConfig(**_SIZES, head_dim=16, num_hidden_layers=7, sliding_window=7),
            [0, 5],
        ),
        (
            transformers.Qwen3MoeConfig(
                **_SIZES,
                num_hidden_layers=4,
                head_dim=16,
                moe_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
                mlp_only_layers=[2],
            ),
            [0, 2],
        ),
        (
            transformers.SmolLM3Config(
                **_SIZES, num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0] * 2, pad_token_id=0
            ),
            [0, 3],
        ),
        (transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=5, n_head=4), [0]),
        (
            transformers.Qwen3NextConfig(
                **_SIZES,
                num_hidden_layers=8,
                head_dim=16,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
            ),
            [0, 3],
        ),
        (
            transformers.FalconH1Config(
                **_SIZES,
                num_hidden_layers=6,
                mamba_d_ssm=64,
                mamba_n_heads=4,
                mamba_d_head=16,
                mamba_d_state=8,
            ),
            [0],
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_kinds(config: Any, kinds: list[int]) -> None:
    torch.manual_seed(0)
    policy = Policy(transformers.AutoModelForCausalLM.from_config(config), stream="padded").eval()
    assert {number for number, *_ in pairs_of_layers(policy)} == set(kinds)
    stream, shares_prompts, _ = widest_stream(policy)
    found = _by_layers(policy)
    assert (found.stream, found.shares_prompts) == (stream, shares_prompts)


class _Mixing(nn.Module):
    """A feed-forward part that also carries half of each token into the next."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        moved = hidden_BTD.roll(1, dims=1)
        return self.own(hidden_BTD + 0.5 * moved)


def test_a_leak_in_the_rarest_kind_is_found() -> None:
    model: Any = random_model("llama", num_hidden_layers=9)
    model.model.layers[7].mlp = _Mixing(model.model.layers[7].mlp)
    policy = Policy(model, stream="padded").eval()
    assert pairs_of_layers(policy) == [(0, 1), (0, 7), (7, 0)]
    assert _by_layers(policy).stream == "padded"
    model.model.layers[7].mlp = model.model.layers[7].mlp.own
    assert _by_layers(policy).stream == "prefix"


def test_layers_that_need_others_take_rows_of_their_own() -> None:
    """The last layers of Gemma 3n attend to the keys and values of earlier ones."""
    config: Any = transformers.Gemma3nTextConfig(
        **_SIZES,
        num_hidden_layers=10,
        num_kv_shared_layers=5,
        head_dim=16,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        sliding_window=7,
        pad_token_id=0,
    )
    policy = Policy(transformers.AutoModelForCausalLM.from_config(config), stream="padded").eval()
    before = config.to_dict()
    assert _by_layers(policy).stream == "padded"
    assert policy.model.config.to_dict() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_see_are_no_decoder_layers(family: str) -> None:
    """Also where most of the weights are theirs."""
    config = config_of(family)
    config.vision_config.depth = 40
    model = transformers.AutoModelForImageTextToText.from_config(config)
    policy = Policy(model, stream="padded").eval()
    assert list(decoder_layers(policy)) == [f"model.model.language_model.layers.{n}" for n in range(3)]
    assert _by_layers(policy).stream == "prefix"
    assert len(model.model.language_model.layers) == 3
