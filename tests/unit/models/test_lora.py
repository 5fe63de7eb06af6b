"""Adapters on a policy: gradients against plain peft, off is the base, merged is the same, saved is restored.

The oracle of gradients is peft's own model with the logits of whole rows; nothing of covey's streams or
chunked head is in it.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from covey.errors import CheckpointError
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import choose_stream, load_adapted, load_any, load_policy, save_policy
from covey.models.lora import (
    AdapterError,
    adapter_off,
    adapter_parameters,
    load_adapter,
    merged,
    plain_weights,
)
from covey.models.probe import micro_of
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import plain

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
LORA = LoraSettings(rank=4, alpha=8)
KINDS = {"lora": LORA, "rslora": replace(LORA, use_rslora=True), "dora": replace(LORA, use_dora=True)}
WHOLE = replace(LORA, modules_to_save=("lm_head", "embed_tokens"))


def adapted(directory, settings=LORA, **changes):
    options = {
        "adapter": None,
        "seed": 0,
        "compute_dtype": FP32,
        "device": CPU,
        "disable_dropout": True,
    }
    policy = load_adapted(directory, settings, **{**options, **changes})
    policy.use_stream("prefix")
    return policy


@torch.no_grad()
def disturb(policy, scale=0.05, seed=3):
    """Move everything that is trained, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def computing(policy, dtype):
    """Whole copies in the dtype that a backend casts them to."""
    for name, parameter in policy.named_parameters():
        if name not in adapter_parameters(policy):
            parameter.data = parameter.data.to(dtype)
    return policy


def base_policy(directory, dtype=FP32):
    policy = load_policy(directory, device=CPU, disable_dropout=True)
    policy.use_stream("prefix")
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


@pytest.fixture
def rows(random_rows):
    return random_rows((11, (7, 4)), (6, (9, 5)))


@torch.no_grad()
def logprobs(policy, rows):
    return policy(micro_of(rows, policy.stream, CPU)).logprob_N


def bits(policy):
    return {n: p.detach().clone() for n, p in policy.named_parameters()}


def same_bits(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


# -- what an adapter is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_scaling(kind, bases):
    policy = adapted(bases("qwen2"), KINDS[kind])
    layer = policy.model.get_submodule("model.layers.0.mlp.down_proj")
    assert layer.lora_A["default"].weight.shape == (4, 96)
    assert layer.lora_B["default"].weight.shape == (64, 4)
    # alpha / rank = 8 / 4; alpha / sqrt(rank) = 8 / 2.
    assert layer.scaling["default"] == {"lora": 2.0, "rslora": 4.0, "dora": 2.0}[kind]
    assert KINDS[kind].scaling == layer.scaling["default"]
    magnitudes = [p for n, p in policy.named_parameters() if "magnitude" in n]
    assert len(magnitudes) == (21 if kind == "dora" else 0)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == adapter_parameters(policy)
    assert len(trained) == 21 * (3 if kind == "dora" else 2)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_new_adapter_changes_no_bit(family, kind, dtype, bases, rows):
    policy = adapted(bases(family), KINDS[kind], compute_dtype=dtype)
    expected = logprobs(base_policy(bases(family), dtype), rows)
    assert torch.equal(logprobs(policy, rows), expected)
    held = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert held == {True: FP32, False: dtype}


def test_the_seed_decides_and_nothing_else_moves(bases):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = bits(adapted(bases("llama"), seed=7))
    torch.manual_seed(2)
    assert same_bits(one, bits(adapted(bases("llama"), seed=7)))
    assert not same_bits(one, bits(adapted(bases("llama"), seed=8)))
    torch.manual_seed(1)
    adapted(bases("llama"), seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen2", replace(LORA, target_modules=("q_poj",)), "matches no module; similar names: q_proj"),
        ("qwen2", replace(LORA, target_modules=("q_proj", "lm_head")), "the loss uses their weights"),
        ("llama", replace(LORA, target_modules=("embed_tokens",)), "the loss uses their weights"),
        ("mixtral", replace(LORA, target_modules=("gate",)), "fused"),
        ("qwen2", replace(LORA, modules_to_save=("lm_head",)), "one tensor"),
        (
            "qwen2",
            replace(LORA, target_modules=("q_proj",), modules_to_save=("q_proj",)),
            "no module remains",
        ),
    ],
)
def test_refusals(family, settings, words, bases):
    with pytest.raises(AdapterError, match=words):
        adapted(bases(family), settings)


def test_dropout_is_silenced_with_the_others(bases, rows):
    settings = replace(LORA, dropout=0.5)
    silent = disturb(adapted(bases("llama"), settings))
    assert torch.equal(logprobs(silent, rows), logprobs(silent, rows))
    loud = disturb(adapted(bases("llama"), settings, disable_dropout=False))
    assert not torch.equal(logprobs(loud, rows), logprobs(loud, rows))


# -- gradients ---------------------------------------------------------------------------------------------


def plain_peft_gradients(directory, policy, rows, weights, tmp_path):
    """The same adapter on a fresh model, every row alone, with the logits of the whole row."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_policy(policy, directory, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=FP32)
    handle = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.tensor([list(row.token_ids)])
        logprob = handle(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (logprob[row.prompt_length - 1 :] * weight).sum().backward()
    prefix = "base_model.model."
    return {n.removeprefix(prefix): p.grad for n, p in handle.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2", LORA), ("gpt2", KINDS["dora"]), ("llama", WHOLE), ("mixtral", KINDS["rslora"])],
)
def test_gradients_are_those_of_plain_peft(
    family, settings, gradient_checkpointing, bases, rows, tmp_path, assert_close_guarded
):
    policy = adapted(bases(family), settings)
    if gradient_checkpointing:
        policy.keep_activations("full")
    disturb(policy)
    generator = torch.Generator().manual_seed(9)
    lengths = [len(r.token_ids) - r.prompt_length for r in rows]
    weights = [torch.randn(n, generator=generator) for n in lengths]
    (policy(micro_of(rows, "prefix", CPU)).logprob_N * torch.cat(weights)).sum().backward()
    expected = plain_peft_gradients(bases(family), policy, rows, weights, tmp_path)
    actual = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close_guarded(actual[name], gradient, rtol=1e-4)
        assert gradient.any(), name
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)


def test_at_the_first_step_every_b_has_a_gradient_and_no_a(bases, rows):
    policy = adapted(bases("qwen2"))
    policy(micro_of(rows, "prefix", CPU)).logprob_N.sum().backward()
    has = {n: bool(p.grad.any()) for n, p in policy.named_parameters() if p.requires_grad}
    assert all(is_moved == (".lora_B." in name) for name, is_moved in has.items())
    assert sum(has.values()) == 21


# -- the head and the embedding, trained whole -------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_copy_is_what_the_policy_computes_with(name, bases, rows):
    policy = adapted(bases("llama"), replace(LORA, modules_to_save=(name,)))
    before = logprobs(policy, rows)
    head = policy.model.get_output_embeddings()
    embedding = policy.model.get_input_embeddings()
    part = head if name == "lm_head" else embedding
    own = part.modules_to_save["default"].weight
    assert part.weight is own and own.requires_grad and not part.original_module.weight.requires_grad
    with torch.no_grad():
        own += 0.05 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    after = logprobs(policy, rows)
    assert (after - before).abs().max() > 1e-2
    # The engine's logits, and transformers' own.
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(policy.logits(hidden), hidden @ head.weight.T)
        policy.use_stream("padded")
        ids = torch.tensor([list(rows[0].token_ids)])
        alone = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    count = len(rows[0].token_ids) - rows[0].prompt_length
    assert torch.allclose(alone[-count:], after[:count], atol=1e-5)


# -- off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("settings", [*KINDS.values(), WHOLE], ids=[*KINDS, "whole"])
def test_off_is_the_base_bit_for_bit(settings, dtype, bases, rows):
    policy = computing(disturb(adapted(bases("llama"), settings, compute_dtype=dtype)), dtype)
    changed = logprobs(policy, rows)
    trained = [n for n, p in policy.named_parameters() if p.requires_grad]
    with adapter_off(policy):
        assert torch.equal(logprobs(policy, rows), logprobs(base_policy(bases("llama"), dtype), rows))
    assert (logprobs(policy, rows) - changed).abs().max() == 0 and changed.abs().max() > 0
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == trained


def test_off_while_merged_is_refused(bases):
    policy = disturb(adapted(bases("llama")))
    with merged(policy), pytest.raises(AssertionError, match="merged"), adapter_off(policy):
        pass


# -- merged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*KINDS.values(), WHOLE], ids=[*KINDS, "whole"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_logits_are_the_unmerged_ones(family, settings, bases, rows):
    if family == "gpt2" and settings is WHOLE:
        settings = replace(LORA, modules_to_save=("ln_f",))
    policy = disturb(adapted(bases(family), settings)).eval()
    policy.use_stream("padded")
    ids = torch.tensor([list(rows[0].token_ids)])
    before = bits(policy)
    plain = base_policy(bases(family)).eval()
    plain.use_stream("padded")
    with torch.no_grad():
        unmerged = policy.model(input_ids=ids).logits
        with merged(policy):
            assert (policy.model(input_ids=ids).logits - unmerged).abs().max() < 1e-5
        assert torch.equal(policy.model(input_ids=ids).logits, unmerged)
        assert (plain.model(input_ids=ids).logits - unmerged).abs().max() > 0.1
    assert same_bits(bits(policy), before)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_thousand_merges_leave_the_base_as_it_was(kind, bases, rows):
    settings = replace(KINDS[kind], target_modules=("layers.0.self_attn.q_proj",))
    policy = disturb(adapted(bases("llama"), settings))
    held = bits(policy)
    (layer,) = policy.adapter.layers
    address = layer.get_base_layer().weight.data_ptr()
    for _ in range(1000):
        with merged(policy):
            assert not same_bits(bits(policy), held)
            assert layer.get_base_layer().weight.data_ptr() == address
    assert layer.get_base_layer().weight.data_ptr() == address
    assert same_bits(bits(policy), held)
    # Adding and subtracting, which is what it does not do, drifts.
    weight, update = (
        layer.get_base_layer().weight.detach().clone(),
        layer.get_delta_weight("default").detach(),
    )
    for _ in range(1000):
        weight += update
        weight -= update
    assert not torch.equal(weight, layer.get_base_layer().weight)


def test_an_error_inside_leaves_the_base_too(bases):
    policy = disturb(adapted(bases("llama")))
    held = bits(policy)
    with pytest.raises(KeyError), merged(policy):
        raise KeyError
    assert same_bits(bits(policy), held)
    assert not any(layer.merged for layer in policy.adapter.layers)


def test_bfloat16_is_not_merged(bases, rows):
    policy = disturb(adapted(bases("llama"), compute_dtype=BF16))
    expected = logprobs(policy, rows)
    with merged(policy):
        assert not any(layer.merged for layer in policy.adapter.layers)
        assert torch.equal(logprobs(policy, rows), expected)


def test_the_engine_samples_the_same_merged_and_unmerged(bases):
    policy = disturb(adapted(bases("qwen2")), scale=0.1).eval()
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, stop_token_ids=(314,))
    prompts = [tuple(range(3 + i, 9 + 2 * i)) for i in range(4)]
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt,
            sampling=sampling,
            turn=TurnId(seed=0, split="train", rollout=0, attempt=0, prompt_id=i, sibling=s),
        )
        for i, prompt in enumerate(prompts)
        for s in range(4)
    ]

    def sample():
        engine = NativeEngine(policy)
        numbers = [engine.submit(r) for r in requests]
        done = {c.request_id: plain(c).token_ids for c in engine.results()}
        return [done[n] for n in numbers]

    unmerged = sample()
    with merged(policy):
        assert sample() == unmerged
    with adapter_off(policy):
        assert sample() != unmerged


@pytest.mark.parametrize("settings", [*KINDS.values(), WHOLE], ids=[*KINDS, "whole"])
def test_plain_weights_load_into_a_plain_model(settings, bases, rows):
    policy = disturb(adapted(bases("llama"), settings))
    plain = base_policy(bases("llama"))
    weights = dict(plain_weights(policy))
    assert weights.keys() == {n for n, _ in plain.model.named_parameters()}
    with merged(policy):
        assert same_bits(weights, dict(plain_weights(policy)))
    plain.model.load_state_dict(weights)
    assert (logprobs(plain, rows) - logprobs(policy, rows)).abs().max() < 1e-5
    # Without an adapter they are what the model holds.
    assert same_bits(dict(plain_weights(plain)), dict(plain.model.named_parameters()))


# -- saved -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("settings", [*KINDS.values(), WHOLE], ids=[*KINDS, "whole"])
def test_saved_and_loaded_bit_for_bit(settings, dtype, bases, rows, tmp_path):
    policy = computing(disturb(adapted(bases("llama"), settings, compute_dtype=dtype)), dtype)
    save_policy(policy, bases("llama"), tmp_path)
    again = adapted(bases("llama"), settings, compute_dtype=dtype, adapter=tmp_path, seed=99)
    computing(again, dtype)
    assert same_bits(bits(again), bits(policy))
    assert torch.equal(logprobs(again, rows), logprobs(policy, rows))
    assert not list(tmp_path.glob("model*.safetensors"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(bases("llama"))
    assert config["target_modules"] == sorted(config["target_modules"])


@pytest.mark.parametrize("settings", [*KINDS.values(), WHOLE], ids=[*KINDS, "whole"])
def test_peft_alone_loads_it(settings, bases, rows, tmp_path):
    from peft import AutoPeftModelForCausalLM

    policy = disturb(adapted(bases("llama"), settings)).eval()
    policy.use_stream("padded")
    save_policy(policy, bases("llama"), tmp_path)
    handle = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=FP32)
    ids = torch.tensor([list(rows[0].token_ids)])
    with torch.no_grad():
        assert torch.equal(handle(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_any_directory_is_loaded(bases, rows, tmp_path):
    policy = disturb(adapted(bases("llama"), KINDS["dora"]))
    save_policy(policy, bases("llama"), tmp_path / "adapter")
    for directory, expected in (
        (tmp_path / "adapter", policy),
        (bases("llama"), base_policy(bases("llama"))),
    ):
        loaded = load_any(directory, device=CPU)
        assert not loaded.training
        loaded.use_stream("prefix")
        assert torch.equal(logprobs(loaded, rows), logprobs(expected, rows))
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(bases("llama")), "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere; give its location"):
        load_any(tmp_path / "adapter", device=CPU)
    loaded = load_any(tmp_path / "adapter", device=CPU, base=bases("llama"))
    loaded.use_stream("prefix")
    assert torch.equal(logprobs(loaded, rows), logprobs(policy, rows))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(LORA, rank=8, alpha=16), "another adapter"),
        (replace(LORA, alpha=16), "scaling 2, but this one has 4"),
        (replace(LORA, target_modules=("q_proj",)), "another adapter"),
        (KINDS["dora"], "another adapter"),
    ],
)
def test_another_adapter_is_not_loaded(settings, words, bases, tmp_path):
    save_policy(adapted(bases("llama")), bases("llama"), tmp_path)
    policy = adapted(bases("llama"), settings)
    held = bits(policy)
    with pytest.raises(CheckpointError, match=words):
        load_adapter(policy, tmp_path)
    assert same_bits(bits(policy), held)


# -- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "stream"),
    [
        ("qwen3", FP32, "prefix"),
        ("qwen3", BF16, "prefix"),
        ("gemma2", BF16, "prefix"),
        ("gpt2", FP32, "prefix"),
        ("lfm2", FP32, "padded"),
    ],
)
def test_the_probe_works_with_an_adapter_on(family, dtype, stream, bases):
    policy = disturb(adapted(bases(family), compute_dtype=dtype))
    before = bits(policy)
    choose_stream(policy)
    assert policy.stream == stream
    assert same_bits(bits(policy), before)
    assert all(p.grad is None for p in policy.parameters())


def test_a_copied_policy_has_an_adapter_of_its_own(bases, rows):
    policy = adapted(bases("llama"))
    twin = disturb(copy.deepcopy(policy))
    with merged(twin):
        assert not any(layer.merged for layer in policy.adapter.layers)
    with adapter_off(twin):
        assert torch.equal(logprobs(twin, rows), logprobs(policy, rows))
    assert not torch.equal(logprobs(twin, rows), logprobs(policy, rows))
