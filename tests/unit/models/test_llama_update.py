"""The update's short pass against transformers' modules: values and the gradient of every weight."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from covey.models import llama_update, llama_update_native
from covey.models.adapter_shapes import LoraSettings
from covey.models.llama_update import update_weights
from covey.models.lora import adapter_off, add_adapter, merged
from covey.models.policy import Policy
from covey.models.probe import micro_of
from support.models import policy_of, random_model
from support.processors import library_for, processors


@pytest.fixture(scope="module", params=["torch", *processors()])
def way(request, tmp_path_factory):
    """The short pass in torch, and the one in C of this processor and of others."""
    if request.param == "torch":
        return None
    return library_for(request.param, tmp_path_factory)


@pytest.fixture(autouse=True)
def _in_that_way(way, monkeypatch):
    """So runs every test."""
    monkeypatch.setattr(Policy, "library", way)


def results(policy: Policy, rows, kind: str, *, short: bool, monkeypatch) -> dict[str, torch.Tensor]:
    """Logprobs, entropies and every gradient."""
    policy.use_stream(kind)
    policy.zero_grad(set_to_none=True)
    micro = micro_of(rows, kind, policy.device)
    with monkeypatch.context() as patched:
        if not short:
            patched.setattr(Policy, "_short", None)
        stats = policy(replace(micro, temperature_N=torch.full_like(micro.temperature_N, 0.8)))
    weight_N = torch.randn(stats.logprob_N.shape, generator=torch.Generator().manual_seed(3))
    ((stats.logprob_N + 0.3 * stats.entropy_N) * weight_N).sum().backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    return {"logprob": stats.logprob_N.detach(), "entropy": stats.entropy_N.detach(), **gradients}


FAMILIES = ("qwen2", "llama", "mistral")
MODELS = {
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "one key head": {"num_key_value_heads": 1},
    # The others' heads are narrower than what the library computes.
    "wide heads with biases": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "wide heads": {"sliding_window": None, "head_dim": 32, "hidden_size": 96},
    "two wide heads": {
        "sliding_window": None,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize("kind", ["packed", "prefix"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(9, 4, 1), (70, 90, 3)], ids=["short rows", "long rows"])
def test_values_and_gradients_are_those_of_the_modules(
    lengths, name, kind, random_rows, monkeypatch, assert_close_guarded
):
    family = name if name in FAMILIES else "mistral" if name.endswith("wide heads") else "qwen2"
    # Weights as large as this keep attention far from uniform, where what is alike in keys cancels.
    policy, exact = (policy_of(family, **MODELS[name], initializer_range=0.1) for _ in range(2))
    assert update_weights(policy.model) is not None
    rows = random_rows((11, lengths), (5, (8, 2)))
    exact.model.double()
    expected = results(exact, rows, kind, short=False, monkeypatch=monkeypatch)
    actual = results(policy, rows, kind, short=True, monkeypatch=monkeypatch)
    assert actual.keys() == expected.keys() and len(actual) > 15
    for part, value in expected.items():
        assert_close_guarded(actual[part], value, rtol=5e-5)


def test_the_library_is_called_where_heads_are_wide(way, random_rows, monkeypatch):
    called = []
    real = llama_update_native.Stack.call
    monkeypatch.setattr(
        llama_update_native.Stack, "call", lambda *a, **k: (called.append(a[1]), real(*a, **k))[1]
    )
    policy = policy_of("mistral", **MODELS["wide heads"])
    results(policy, random_rows((11, (9, 4))), "prefix", short=True, monkeypatch=monkeypatch)
    assert called == (["stack_forward", "stack_backward"] if way else [])


@pytest.mark.parametrize("way", processors(), indirect=True)
def test_the_number_of_threads_changes_no_bit(random_rows, monkeypatch):
    policy = policy_of("mistral", **MODELS["wide heads"])
    rows = random_rows((11, (9, 40, 3)), (5, (8, 2)))
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch))
    finally:
        torch.set_num_threads(before)
    layers = [name for name in found[0] if ".layers." in name]
    assert len(layers) > 15 and all(torch.equal(found[0][n], found[1][n]) for n in layers)


def test_the_short_pass_is_taken(random_rows, monkeypatch):
    policy, rows = policy_of("qwen2"), random_rows((11, (9, 4)))
    assert is_short(policy, rows, monkeypatch)
    policy.keep_activations("full")
    assert not is_short(policy, rows, monkeypatch)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("gemma2", {}),
        ("mixtral", {}),
        ("gpt2", {}),
        ("mistral", {"sliding_window": 7}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_what_it_does_not_know_it_leaves_to_the_modules(family, changes):
    assert update_weights(policy_of(family, **changes).model) is None


def test_precision_size_and_listeners(monkeypatch):
    policy = policy_of("llama")
    known = update_weights(policy.model)
    assert known is not None
    monkeypatch.setattr(llama_update, "_LARGEST", known.size - 1)
    assert update_weights(policy.model) is None
    monkeypatch.setattr(llama_update, "_LARGEST", known.size)
    handle = policy.model.base_model.layers[1].register_forward_pre_hook(lambda *_: None)
    assert update_weights(policy.model) is None
    handle.remove()
    assert update_weights(policy.model) is not None
    assert update_weights(policy.to(torch.bfloat16).model) is None


def is_short(policy: Policy, rows, monkeypatch) -> bool:
    """Whether a pass is the short one."""
    called = []
    real = llama_update.ShortPass.hidden
    with monkeypatch.context() as patched:
        patched.setattr(
            llama_update.ShortPass, "hidden", lambda *a, **k: (called.append(1), real(*a, **k))[1]
        )
        results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)
    return bool(called)


def test_a_model_that_changes_between_passes_is_read_again(random_rows, monkeypatch, assert_close_guarded):
    policy, rows = policy_of("mistral", **MODELS["wide heads"]), random_rows((11, (9, 4)))
    layers = policy.model.base_model.layers
    # Who listens from the first pass on and then stops.
    handle = layers[0].register_forward_hook(lambda *_: None)
    assert not is_short(policy, rows, monkeypatch)
    handle.remove()
    assert is_short(policy, rows, monkeypatch)
    handle = layers[1].mlp.up_proj.register_full_backward_hook(lambda *_: None)
    assert not is_short(policy, rows, monkeypatch)
    handle.remove()
    assert is_short(policy, rows, monkeypatch)
    for layer in layers:
        layer.self_attn.attention_dropout = 0.1
    assert not is_short(policy, rows, monkeypatch)
    for layer in layers:
        layer.self_attn.attention_dropout = 0.0
    assert is_short(policy, rows, monkeypatch)

    def replaced() -> None:
        other = torch.nn.Linear(*reversed(layers[2].self_attn.v_proj.weight.shape), bias=False)
        layers[2].self_attn.v_proj = other

    def reassigned() -> None:
        layers[0].mlp.down_proj.weight = torch.nn.Parameter(layers[0].mlp.down_proj.weight.detach() * 0.5)

    def moved() -> None:
        layers[1].input_layernorm.weight.data = layers[1].input_layernorm.weight.data + 0.5

    for change in (replaced, reassigned, moved):
        before = results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)["logprob"]
        change()
        assert is_short(policy, rows, monkeypatch)
        expected = results(policy, rows, "prefix", short=False, monkeypatch=monkeypatch)
        actual = results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)
        assert not torch.allclose(actual["logprob"], before, rtol=1e-3)
        for part, value in expected.items():
            assert_close_guarded(actual[part], value, rtol=1e-4)
    assert policy.to(torch.bfloat16)._short is None
    assert policy.to(torch.float32)._short is not None


def test_gradients_that_a_pass_adds_by_itself(way, random_rows, monkeypatch, assert_close_guarded):
    policy = policy_of("qwen2", **MODELS["wide heads with biases"])
    streams = [random_rows((11, (9, 4)), (5, (8, 2))), random_rows((6, (40, 3)), (7, (3, 3)))]
    micros = [micro_of(rows, "prefix", policy.device) for rows in streams]
    told: list[bool] = []
    weight = policy.model.base_model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: told.append(gradient is not None))
    found = []
    for adds in (False, True):
        policy.zero_grad(set_to_none=True)
        for micro in micros:
            with policy.adding_gradients() if adds else nullcontext():
                stats = policy(micro)
            (stats.logprob_N.sum() + 0.3 * stats.entropy_N.sum()).backward()
        found.append({n: p.grad for n, p in policy.named_parameters()})
    assert len(found[0]) > 15
    for name, gradient in found[0].items():
        assert_close_guarded(found[1][name], gradient, rtol=1e-5)
    # Autograd hears of none of them in C, and so nobody else does.
    assert told == [True] * (2 if way else 4)
    # A gradient that is asked for is given, and adds to nothing.
    kept = weight.grad.clone()
    stats = policy(micros[0])
    (asked,) = torch.autograd.grad(stats.logprob_N.sum(), weight)
    assert torch.equal(weight.grad, kept) and bool(asked.any())


def test_a_pass_whose_embeddings_are_frozen_reaches_the_layers(way, random_rows, assert_close_guarded):
    policy = policy_of("qwen2", **MODELS["wide heads with biases"])
    policy.model.base_model.embed_tokens.weight.requires_grad_(False)
    micro = micro_of(random_rows((11, (9, 4)), (5, (8, 2))), "prefix", policy.device)
    found = []
    for adds in (False, True):
        policy.zero_grad(set_to_none=True)
        with policy.adding_gradients() if adds else nullcontext():
            stats = policy(micro)
        stats.logprob_N.sum().backward()
        found.append({n: p.grad for n, p in policy.named_parameters() if p.requires_grad})
    assert len(found[0]) > 15
    for name, gradient in found[0].items():
        assert_close_guarded(found[1][name], gradient, rtol=1e-5)


def test_frozen_weights_pass_the_gradient_on(random_rows, monkeypatch, assert_close_guarded):
    policy = Policy(random_model("qwen2")).eval()
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("layers.0" in name and "norm" not in name)
    rows = random_rows((6, (5, 3)))
    expected = results(policy, rows, "prefix", short=False, monkeypatch=monkeypatch)
    actual = results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)
    assert actual.keys() == expected.keys() and len(actual) > 7
    for part, value in expected.items():
        assert_close_guarded(actual[part], value, rtol=1e-4)


@pytest.mark.parametrize("name", ["one key head", "wide heads", "wide heads with biases"])
def test_a_weight_that_is_no_number_shows(name, random_rows, monkeypatch):
    family = "mistral" if name == "wide heads" else "qwen2"
    policy = policy_of(family, **MODELS[name])
    rows = random_rows((11, (9, 4)))
    for weight in policy.model.base_model.layers[1].parameters():
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] = torch.nan
        found = results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)
        assert bool(found["logprob"].isnan().any())
        with torch.no_grad():
            weight.copy_(kept)


LORA = LoraSettings(rank=4, alpha=8)
ADAPTERS = {
    "every layer": LORA,
    "two of seven": replace(LORA, target_modules=("q_proj", "down_proj"), use_rslora=True),
    "whole copies": replace(LORA, modules_to_save=("embed_tokens", "norm"), target_modules=("v_proj",)),
}


def adapted(settings: LoraSettings, name: str = "wide heads", *, moved: bool = True) -> Policy:
    """A policy with an adapter, as it is after some updates where it has `moved`."""
    family = "mistral" if name.endswith("wide heads") else "qwen2"
    policy = policy_of(family, **MODELS[name])
    add_adapter(policy, settings, seed=0)
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.parameters():
        if moved and parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("name", ["wide heads", "wide heads with biases"])
def test_an_adapter_as_the_modules_compute_it(name, settings, random_rows, monkeypatch, assert_close_guarded):
    if name != "wide heads" and settings.modules_to_save:
        settings = replace(settings, modules_to_save=("norm",))
    policy, exact = adapted(settings, name), adapted(settings, name)
    rows = random_rows((11, (9, 4, 1)), (5, (40, 2)))
    assert is_short(policy, rows, monkeypatch)
    exact.model.double()
    expected = results(exact, rows, "prefix", short=False, monkeypatch=monkeypatch)
    actual = results(policy, rows, "prefix", short=True, monkeypatch=monkeypatch)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert actual.keys() == expected.keys() == {"logprob", "entropy", *trained}
    for part, value in expected.items():
        assert_close_guarded(actual[part], value, rtol=1e-4)


@torch.no_grad()
def test_an_adapter_that_comes_goes_or_is_merged(random_rows):
    rows = random_rows((11, (9, 4)))

    def logprobs(policy: Policy) -> torch.Tensor:
        assert policy._short is not None
        return policy(micro_of(rows, "prefix", policy.device)).logprob_N

    base, policy = policy_of("mistral", **MODELS["wide heads"]), adapted(LORA)
    plain, on = logprobs(base), logprobs(policy)
    assert not torch.allclose(on, plain, atol=1e-2)
    assert torch.equal(logprobs(adapted(LORA, moved=False)), plain)
    with adapter_off(policy):
        assert torch.equal(logprobs(policy), plain)
    assert torch.equal(logprobs(policy), on)
    with merged(policy):
        assert torch.allclose(logprobs(policy), on, atol=1e-5)
    assert torch.equal(logprobs(policy), on)


@pytest.mark.parametrize(
    "settings", [replace(LORA, use_dora=True), replace(LORA, dropout=0.5)], ids=["dora", "dropout"]
)
def test_other_adapters_are_left_to_the_modules(settings, random_rows, monkeypatch):
    policy, rows = adapted(settings), random_rows((11, (9, 4)))
    assert not is_short(policy, rows, monkeypatch)
    # One that is off is computed as it is when it is on.
    with adapter_off(policy):
        assert update_weights(policy.model) is None
    with merged(policy):
        assert update_weights(policy.model) is not None


@pytest.mark.parametrize("way", processors(), indirect=True)
def test_weights_are_laid_once_where_none_changes(way, random_rows):
    policy = policy_of("mistral", **MODELS["wide heads"])
    micros = [micro_of(random_rows((6, (4, 3))), "prefix", policy.device) for _ in range(2)]

    def values() -> list[torch.Tensor]:
        return [policy(micro).logprob_N.detach() for micro in micros]

    def change() -> None:
        policy.model.base_model.layers[0].mlp.up_proj.weight.data *= 1.5

    before = values()
    with policy.same_weights():
        assert all(map(torch.equal, values(), before))
        # Who breaks the promise gets what the weights were.
        change()
        assert all(map(torch.equal, values(), before))
    changed = values()
    assert not any(map(torch.equal, changed, before))
    # Another weight in its place is seen by the next passes.
    weight = policy.model.base_model.layers[0].mlp.up_proj.weight
    policy.model.base_model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().clone())
    with policy.same_weights():
        assert all(map(torch.equal, values(), changed))
    change()
    assert not any(map(torch.equal, values(), changed))


def test_embeddings_and_head_that_are_one_get_both_gradients(way, random_rows, assert_close_guarded):
    policy = policy_of("qwen2", **MODELS["wide heads with biases"], tie_word_embeddings=True)
    weight = policy.model.get_input_embeddings().weight
    assert weight is policy.model.get_output_embeddings().weight
    # A token that comes several times, in both.
    micro = micro_of(random_rows((11, (9, 4)), (5, (8, 2))), "prefix", policy.device)
    found = []
    for adds, copies in ((False, False), (True, False), (True, True)):
        policy.zero_grad(set_to_none=True)
        for _ in range(2):
            # Somebody who keeps copies of what is saved gives back other tensors than the weights.
            copying = saved_tensors_hooks(torch.clone, torch.clone) if copies else nullcontext()
            with policy.adding_gradients() if adds else nullcontext(), copying:
                stats = policy(micro)
            (stats.logprob_N.sum() + 0.3 * stats.entropy_N.sum()).backward()
        found.append(weight.grad)
    assert_close_guarded(found[1], found[0], rtol=1e-5)
    assert torch.equal(found[2], found[1])
