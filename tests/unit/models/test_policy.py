"""One policy, three layouts: values, entropy and the gradient of every parameter agree.

The oracle is each row alone through transformers' own forward pass and logits. What is proved per family:
rotary and learned positions, sliding windows shorter than the rows, soft caps, sinks, grouped keys, biases,
expert routing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.token_streams import Row

FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "cohere", "granite"),
)
KINDS = ("padded", "packed", "prefix")
# Two families of siblings, a row of one trained token, and rows longer than the sliding window of 7.
SHAPE = ((11, (9, 4, 1)), (5, (8, 2)))

Result = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def mixed_loss(logprob: torch.Tensor, entropy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (logprob * weight).sum() + (entropy * weight.flip(0)).sum()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: Any, rows: Sequence[Row], temperature: torch.Tensor, weight: torch.Tensor) -> Result:
    """Every row by itself, through the model's own logits."""
    logprobs, entropies, start = [], [], 0
    for row in rows:
        ids = torch.tensor([list(row.token_ids)])
        length = len(row.token_ids) - row.prompt_length
        logits = model(input_ids=ids, use_cache=False).logits[0, row.prompt_length - 1 : -1]
        table = (logits / temperature[start : start + length, None]).log_softmax(-1)
        logprobs.append(table.gather(1, ids[0, row.prompt_length :, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
        start += length
    logprob, entropy = torch.cat(logprobs), torch.cat(entropies)
    return logprob.detach(), entropy.detach(), gradients(model, mixed_loss(logprob, entropy, weight))


def streamed(policy: Policy, rows: Sequence[Row], temperature: torch.Tensor, weight: torch.Tensor) -> Result:
    micro = replace(micro_of(rows, policy.stream, policy.device), temperature_N=temperature)
    stats = policy(micro)
    loss = mixed_loss(stats.logprob_N, stats.entropy_N, weight)
    return stats.logprob_N.detach(), stats.entropy_N.detach(), gradients(policy.model, loss)


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    total = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    difference = {name: float((got[name] - g).double().norm()) for name, g in expected.items()}
    assert math.sqrt(sum(d * d for d in difference.values())) <= 1e-5 * total
    for name, g in expected.items():
        norm = float(g.double().norm())
        if norm > 1e-6 * total:
            assert difference[name] <= 1e-4 * norm, name


def settings(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The temperature, one at each place of siblings, and the weight of every trained token."""
    place = torch.cat([torch.arange(sum(r.is_trained)) for r in rows])
    generator = torch.Generator().manual_seed(3)
    temperature, weight = (
        torch.rand(len(place), generator=generator),
        torch.randn(len(place), generator=generator),
    )
    return 0.5 + temperature[place], weight


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree_in_values_and_gradients(family, tiny_model, random_rows, assert_close_guarded):
    model, rows = tiny_model(family), random_rows(*SHAPE)
    temperature, weight = settings(rows)
    logprob, entropy, expected = alone(model, rows, temperature, weight)
    assert len(expected) == len(list(model.parameters()))
    policy = Policy(model)
    for kind in KINDS:
        policy.use_stream(kind)
        got_logprob, got_entropy, got = streamed(policy, rows, temperature, weight)
        assert got_logprob.dtype == got_entropy.dtype == torch.float32
        assert_close_guarded(got_logprob, logprob, rtol=1e-5)
        assert_close_guarded(got_entropy, entropy, rtol=1e-5)
        assert_same_gradients(got, expected)
        for factor in (0.0, -1.0, 2.0):
            with pytest.raises(AssertionError):
                assert_same_gradients({name: factor * g for name, g in got.items()}, expected)


@pytest.mark.parametrize("kind", ["packed", "prefix"])
def test_a_leak_between_rows_would_fail_that(kind, tiny_model, random_rows, assert_close_guarded):
    policy = Policy(tiny_model("qwen2"), stream=kind)
    rows = random_rows(*SHAPE)
    micro = micro_of(rows, kind, policy.device)
    expected = policy(micro).logprob_N.detach()
    first, *rest = micro.segments
    total = len(micro.tokens_T)
    leaking = replace(micro, segments=(replace(first, length=total),))
    with pytest.raises(AssertionError):
        assert_close_guarded(policy(leaking).logprob_N.detach(), expected, rtol=1e-4)
    assert rest


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_the_sliding_window_is_one_that_matters(family, tiny_model, random_rows):
    rows = random_rows(*SHAPE)
    values = []
    for window in (7, 4096):
        model = tiny_model(family)
        model.config.sliding_window = window
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = window
        values.append(Policy(model)(micro_of(rows, "prefix", torch.device("cpu"))).logprob_N.detach())
    assert float((values[0] - values[1]).abs().max()) > 1e-3


def test_gradient_checkpointing_changes_nothing(tiny_model, random_rows):
    rows = random_rows(*SHAPE)
    temperature, weight = settings(rows)
    results = []
    for on in (False, True):
        policy = Policy(tiny_model("llama")).train()
        if on:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        calls = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        results.append(streamed(policy, rows, temperature, weight))
        assert len(calls) == (2 if on else 1)  # the backward pass runs the layer again
    (one, _, one_gradients), (two, _, two_gradients) = results
    assert torch.equal(one, two)
    assert_same_gradients(two_gradients, one_gradients)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt2"])
def test_logits_are_the_models_own(family, tiny_model, assert_close_guarded):
    model = tiny_model(family)
    ids = torch.arange(3, 20)
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
        policy = Policy(model, stream="padded")
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        assert_close_guarded(policy.logits(hidden), expected, rtol=1e-6)
