"""Two layers of each kind stand for a whole model in the probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from covey.learner.sharding.layers import decoder_layers, only_layers, pairs_of_layers
from covey.models.policy import Policy, narrowest
from covey.models.probe import widest_stream
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, VOCAB, random_model

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _by_layers(policy: Policy) -> Any:
    found = []
    for pair in pairs_of_layers(policy):
        with only_layers(policy, pair):
            assert len(decoder_layers(policy)) == len(pair)
            stream, shares_prompts, _ = widest_stream(policy)
        policy.shares_prompts = shares_prompts
        policy.use_stream(stream)
        found.append(policy.layout)
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
