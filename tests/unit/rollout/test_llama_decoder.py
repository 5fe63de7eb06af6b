"""The short steps of the Llama family, in torch and in C, against the general path on the same cache."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from covey.kernels import choose
from covey.kernels.cpu.decoder import CompiledLlama
from covey.kernels.llama import decoder as decoder_module
from covey.kernels.llama.decoder import LlamaDecoder, llama_decoder
from covey.models.adapter_shapes import LoraSettings
from covey.models.lora import add_adapter, merged
from covey.models.policy import Policy
from covey.rollout.native import caches
from covey.rollout.native.engine import NativeEngine
from support.models import config_of, random_model
from support.needs import need


@pytest.fixture(autouse=True, params=["flat", "shared"])
def layout(request, monkeypatch):
    """Every test runs with prompts copied to their rows and with prompts read where they are."""
    if request.param == "shared":
        monkeypatch.setattr(caches, "_FLAT_PROMPT", 0)


@pytest.fixture(autouse=True, params=["torch", "torch, nothing copied", "compiled"])
def kind(request, monkeypatch):
    """Every test of hidden states runs with the step in torch, of a small model and of one whose weights are
    not copied, and with the one in C."""
    if request.param == "compiled":
        need("a C compiler")
        return CompiledLlama
    monkeypatch.setattr(choose, "open_library", lambda: None)
    if request.param != "torch":
        monkeypatch.setattr(decoder_module, "_MOST_COPIED", 0)
    return LlamaDecoder


def policy_of(family: str, **changes: object) -> Policy:
    """A random policy of a family, with other settings of its configuration."""
    if not changes:
        return Policy(random_model(family)).eval()
    config = config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return Policy(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()


def without_a_window() -> Policy:
    return policy_of("mistral", sliding_window=None)


def gaps(kind, policy: Policy, requests, run_engine, monkeypatch, spoil=lambda x: x) -> list[float]:
    """The largest relative difference of the hidden states of every decoding step."""
    step, found = kind.hidden, []

    def both(self: LlamaDecoder | CompiledLlama, tokens: Tensor, positions: Tensor, layout: object) -> Tensor:
        expected = policy.hidden(tokens, positions, layout)
        actual = spoil(step(self, tokens, positions, layout))
        found.append(float((actual - expected).abs().max() / expected.abs().max()))
        return expected

    monkeypatch.setattr(kind, "hidden", both)
    # A call for each token.
    monkeypatch.setattr(CompiledLlama, "sampler", None)
    run_engine(NativeEngine(policy, max_rows=10), requests)
    return found


@pytest.mark.parametrize(
    "make", ["qwen2", "qwen3", "llama", without_a_window], ids=["qwen2", "qwen3", "llama", "no window"]
)
def test_hidden_states_are_those_of_the_modules(
    kind, make, random_prompts, requests_of, run_engine, monkeypatch
):
    policy = policy_of(make) if isinstance(make, str) else make()
    requests = requests_of(random_prompts(9, 3, 14), 4, stop=(5, 17, 40), max_new_tokens=10)
    found = gaps(kind, policy, requests, run_engine, monkeypatch)
    assert len(found) > 5 and max(found) < 1e-5


@pytest.mark.parametrize(
    "spoil", [torch.zeros_like, torch.neg, lambda x: 2 * x], ids=["zero", "neg", "twice"]
)
def test_the_comparison_sees_faults(kind, spoil, random_prompts, requests_of, run_engine, monkeypatch):
    requests = requests_of(random_prompts(9, 3), 2, max_new_tokens=4)
    assert min(gaps(kind, policy_of("llama"), requests, run_engine, monkeypatch, spoil)) > 0.1


def test_a_weight_that_is_no_number_shows(kind, random_prompts, requests_of, run_engine):
    policy = policy_of("qwen3")
    requests = requests_of(random_prompts(9, 3), 2, max_new_tokens=3)
    for weight in policy.model.base_model.layers[1].parameters():
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] = torch.nan
        done = run_engine(NativeEngine(policy), requests)
        assert any(math.isnan(value) for c in done for value in c.logprobs)
        with torch.no_grad():
            weight.copy_(kept)


def test_biases_and_scaled_positions(kind, random_prompts, requests_of, run_engine, monkeypatch):
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    policy = policy_of("llama", attention_bias=True, mlp_bias=True, rope_parameters=scaled)
    for name, parameter in policy.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    requests = requests_of(random_prompts(9, 3), 2, max_new_tokens=6)
    assert max(gaps(kind, policy, requests, run_engine, monkeypatch)) < 1e-5


def test_the_weights_are_those_of_the_moment(kind, random_prompts, requests_of, run_engine, monkeypatch):
    policy = policy_of("qwen2")
    requests = requests_of(random_prompts(9, 3), 2, max_new_tokens=4)
    gaps(kind, policy, requests, run_engine, monkeypatch)
    for parameter in policy.parameters():
        parameter.data = parameter.data * 1.5
    assert max(gaps(kind, policy, requests, run_engine, monkeypatch)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_or_beside_the_weights(
    dtype, kind, random_prompts, requests_of, run_engine, monkeypatch
):
    """The C step wants it merged, which it is in float32 alone."""
    policy = policy_of("qwen2")
    add_adapter(policy, LoraSettings(rank=4, alpha=8, dropout=0.1), seed=0, compute_dtype=dtype)
    policy.eval()
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    requests = requests_of(random_prompts(9, 3), 2, max_new_tokens=4)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    found = gaps(LlamaDecoder, policy, requests, run_engine, monkeypatch)
    assert len(found) > 2 and max(found) < limit
    step = llama_decoder(policy, 64)
    with merged(policy):
        # Merged it is another step: what was added before must not be added again.
        assert (llama_decoder(policy, 64, step) is step) == (dtype == torch.bfloat16)
        of_merged = gaps(
            kind if dtype == torch.float32 else LlamaDecoder, policy, requests, run_engine, monkeypatch
        )
    assert len(of_merged) > 2 and max(of_merged) < limit


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "mixtral"])
def test_what_it_does_not_know_it_leaves_alone(family):
    """Sliding windows, soft-capping, other modules, experts."""
    assert llama_decoder(policy_of(family), 64) is None


def test_another_activation_takes_the_modules():
    assert llama_decoder(policy_of("llama"), 64) is not None
    assert llama_decoder(policy_of("llama", hidden_act="gelu"), 64) is None


def test_turns_that_follow_from_the_longest_row_take_the_modules():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert llama_decoder(policy_of("llama", rope_parameters=dynamic), 64) is None


def test_a_module_that_somebody_listens_to_is_called():
    policy = policy_of("llama")
    handle = policy.model.base_model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert llama_decoder(policy, 64) is None
    handle.remove()
    assert llama_decoder(policy, 64) is not None


def test_a_large_model_is_not_copied(monkeypatch):
    policy = policy_of("llama")
    layers = policy.model.base_model.layers
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    copied = sum(4 * layer.get_submodule(name).weight.numel() for layer in layers for name in names)
    for most, is_copied in ((copied, True), (copied - 1, False)):
        monkeypatch.setattr(decoder_module, "_MOST_COPIED", most)
        step = llama_decoder(policy, 64)
        assert {part is not None for layer in step.layers for part in (layer.heads, layer.gated)} == {
            is_copied
        }


class Calls(TorchDispatchMode):
    """Counts the operators that compute something: what a GPU would launch."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        is_view = (
            isinstance(out, Tensor)
            and out.untyped_storage().data_ptr() in given
            and not func._schema.is_mutable
        )
        self.number += not (is_view or func.is_view)
        return out


def calls_of_a_layer(hidden):
    """What `hidden(layers)` calls for each layer, in a policy of two and one of four."""
    numbers = []
    for layers in (2, 4):
        with torch.inference_mode(), Calls() as calls:
            hidden(layers)
        numbers.append(calls.number)
    return (numbers[1] - numbers[0]) / 2


class Attends:
    """Attention that calls nothing."""

    def attend(self, layer, query_1HTD, key_1KTD, value_1KTD, options):
        return query_1HTD

    def attend_heads(self, layer, heads_nXD, queries, scaling):
        return heads_nXD[:, :queries]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_layer_is_few_operators(family):
    """In bfloat16, without its attention: a GPU launches each of them, for eight tokens at a time."""
    tokens, positions = torch.arange(4), torch.arange(4)

    def by_modules(layers):
        policy = policy_of(family, num_hidden_layers=layers, layer_types=["full_attention"] * layers).to(
            torch.bfloat16
        )
        return lambda: policy.hidden(tokens, positions, Attends())

    def by_step(layers):
        policy = policy_of(family, num_hidden_layers=layers, layer_types=["full_attention"] * layers).to(
            torch.bfloat16
        )
        step = llama_decoder(policy, 64)
        return lambda: step.hidden(tokens, positions, Attends())

    found = {}
    for name, make in (("modules", by_modules), ("step", by_step)):
        made = {layers: make(layers) for layers in (2, 4)}
        found[name] = calls_of_a_layer(lambda layers, made=made: made[layers]())
    is_copied = decoder_module._MOST_COPIED > 0
    most = {"qwen2": 16 if is_copied else 20, "qwen3": 22 if is_copied else 26}[family]
    assert 0 < found["step"] <= most < found["modules"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_lower_precision_rounds_where_the_modules_round(
    kind, family, random_prompts, requests_of, run_engine, monkeypatch
):
    policy = policy_of(family).to(torch.bfloat16)
    requests = requests_of(random_prompts(9, 3, 14), 4, max_new_tokens=10)
    found = gaps(kind, policy, requests, run_engine, monkeypatch)
    # A unit in the last place of bfloat16 is 0.004 to 0.008 of a value. In torch one rounding more would show
    # in every step; in C sums are added in another order, and some values round to their neighbour.
    assert len(found) > 5 and max(found) < 0.02
    assert statistics.median(found) == 0.0 if kind is LlamaDecoder else statistics.median(found) < 0.015
