"""Adapters beside packed weights: what they compute, that no bit of the weights moves, what is left whole.

The oracle is a plain model whose weights are the numbers that bitsandbytes makes of the packed ones. Both
compute in float32, so they differ by the order of sums alone.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit

from covey.algorithm.losses import LossOutput
from covey.checksums import checksum
from covey.config.quantization import Quantization, adapter_quantization
from covey.kernels.torch_.attention import attend_masked
from covey.learner.backends.single import SingleBackend
from covey.learner.fingerprints import frozen_tensors
from covey.models import attention
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import choose_stream, load_adapted, load_policy, save_policy
from covey.models.lora import adapter_off, merge_into_base, merged, plain_weights
from covey.models.probe import micro_of, widest_stream
from covey.models.quantized import coarsest_dtype, is_packed
from covey.selftest.compare import relative
from support.models import random_model
from support.options import learner
from support.rows import random_rows

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
LORA = LoraSettings(rank=4, alpha=8)
NF4 = Quantization(bits=4)
EIGHT = Quantization(bits=8)
OPTIMIZER = learner(weight_decay=0.1)
# Two orders of the same float32 sums.
CLOSE = 1e-5


def adapted(base, quantization, settings=LORA, *, dtype=FP32, seed=0, moved=True, adapter=None):
    """A policy with an adapter, whose update is not 0 where it has `moved`."""
    policy = load_adapted(
        base,
        settings,
        adapter=adapter,
        seed=seed,
        compute_dtype=dtype,
        device=CPU,
        disable_dropout=True,
        quantization=quantization,
    )
    generator = torch.Generator().manual_seed(5)
    for name, parameter in policy.named_parameters():
        if moved and "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def by_hand(weight):
    """The numbers of a packed weight, by bitsandbytes' own function or, of 8 bits, by their definition."""
    if type(weight).__name__ == "Int8Params":
        return weight.data.float() * weight.SCB[:, None] / 127
    return dequantize_4bit(weight.data, weight.quant_state).float()


def unpacked_copy(policy, base, directory):
    """A plain model directory with the numbers of the policy's packed weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=FP32)
    own = dict(model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if is_packed(parameter):
            plain = own[name.replace(".base_layer.", ".")]
            whole = by_hand(parameter)
            # GPT-2 holds its matrices turned round.
            plain.data.copy_(whole.T if model.config.model_type == "gpt2" else whole)
    model.save_pretrained(directory)
    return directory


def rows():
    """Siblings of two prompts."""
    return random_rows((6, (7, 12)), (9, (5, 9)))


def logprobs_and_gradients(policy, stream="prefix"):
    policy.use_stream(stream)
    policy.zero_grad()
    stats = policy(micro_of(rows(), stream, CPU))
    weights = torch.linspace(-1, 2, len(stats.logprob_N))
    (stats.logprob_N * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}
    return stats.logprob_N.detach(), torch.cat([grads[n].flatten() for n in sorted(grads)])


KINDS = {
    "nf4": ("qwen2", NF4, LORA),
    "nf4-single": ("llama", replace(NF4, is_nested=False), LORA),
    "fp4": ("qwen3", replace(NF4, kind="fp4"), LORA),
    "stored-as-float32": ("llama", replace(NF4, storage="float32"), LORA),
    "8-bit": ("qwen2", EIGHT, LORA),
    "turned-round": ("gpt2", NF4, LORA),
    "dora": ("llama", NF4, replace(LORA, use_dora=True)),
    "dora-8-bit": ("llama", EIGHT, replace(LORA, use_dora=True)),
    "whole": ("llama", NF4, replace(LORA, modules_to_save=("o_proj", "lm_head"))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_unpacked_numbers(bases, tmp_path, kind):
    family, quantization, settings = KINDS[kind]
    policy = adapted(bases(family), quantization, settings)
    oracle = adapted(unpacked_copy(policy, bases(family), tmp_path / "plain"), None, settings)
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == [
        n for n, p in oracle.named_parameters() if p.requires_grad
    ]
    values, gradient = logprobs_and_gradients(policy)
    expected, expected_gradient = logprobs_and_gradients(oracle)
    assert relative(values, expected) < CLOSE and relative(gradient, expected_gradient) < CLOSE
    assert relative(2 * gradient, expected_gradient) > 0.5 and float(expected_gradient.norm()) > 1e-3
    # The bits are few enough to be seen: the model before it was packed is another one.
    before, _ = logprobs_and_gradients(adapted(bases(family), None, settings))
    assert relative(values, before) > (0.01 if quantization.bits == 4 else 3e-4)


def test_what_is_packed_and_what_is_not(bases):
    tied, untied = adapted(bases("qwen2"), NF4), adapted(bases("llama"), EIGHT)
    for policy in (tied, untied):
        packed = [n for n, p in policy.named_parameters() if is_packed(p)]
        assert len(packed) == 3 * 7 and all(".base_layer.weight" in n for n in packed)
        assert policy.model.get_output_embeddings().weight.dtype == FP32
        assert all(p.dtype == FP32 for n, p in policy.named_parameters() if not is_packed(p))
    embedding = tied.model.get_input_embeddings().weight
    assert tied.model.get_output_embeddings().weight is embedding
    whole = adapted(bases("llama"), NF4, replace(LORA, modules_to_save=("o_proj", "lm_head")))
    trained = {n for n, p in whole.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert len(trained) == 3 + 1 and not any(
        is_packed(p) for n, p in whole.named_parameters() if n in trained
    )


@pytest.mark.parametrize("quantization", [NF4, replace(NF4, storage="float32"), EIGHT], ids=str)
def test_no_bit_moves(bases, quantization):
    """Neither by a backend that computes in bfloat16, nor by a rollout, a pass or a step. The files give the
    same bits again."""
    policy = adapted(bases("llama"), quantization, dtype=BF16)
    packed = [n for n, p in policy.named_parameters() if is_packed(p)]
    backend = SingleBackend(policy, OPTIMIZER, compute_dtype=BF16)
    before = {n: checksum(t) for n, t in backend.frozen().items()}
    assert set(packed) < before.keys()
    policy.use_stream("prefix")
    micro = micro_of(rows(), "prefix", CPU)
    with backend.rollout_view() as sampler, torch.no_grad():
        sampler(micro)
        assert not any(layer.merged for layer in policy.adapter.layers)
    backend.backward(micro, _loss, last=True)
    backend.step(1e-2)
    again = adapted(bases("llama"), quantization, dtype=BF16, moved=False)
    for frozen in (backend.frozen(), frozen_tensors(again, None)):
        assert {n: checksum(t) for n, t in frozen.items()} == before
    # What the sums can see: a byte, and a constant.
    weight = next(p for p in policy.parameters() if is_packed(p))
    weight.data.view(torch.uint8).view(-1)[0] += 1
    name = packed[0]
    assert checksum(backend.frozen()[name]) != before[name]
    constants = [n for n in before if n.startswith(f"{name}.")]
    assert constants
    backend.frozen()[constants[0]].view(-1)[0] += 1
    assert checksum(backend.frozen()[constants[0]]) != before[constants[0]]


def _loss(stats, micro):
    return LossOutput(loss=stats.logprob_N.sum(), sums={})


@pytest.mark.parametrize("quantization", [NF4, EIGHT], ids=str)
def test_a_token_is_what_it_is_in_any_batch_and_mode(bases, quantization):
    """bitsandbytes' own 8-bit layer rounds inputs by what is beside them, and computes in another way outside
    of training."""
    policy = adapted(bases("qwen2"), quantization)
    layer = policy.adapter.layers[0].get_base_layer()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, layer.in_features, generator=generator)
    loud = torch.cat([x, 50 * torch.randn(3, layer.in_features, generator=generator)])
    alone = layer(x)
    assert relative(layer(loud)[:5], alone) < 1e-6
    assert relative(layer.eval()(x), alone) < 1e-6
    assert type(layer).__mro__[1].__module__.startswith("bitsandbytes")


@pytest.mark.parametrize(("family", "quantization"), [("qwen2", NF4), ("llama", EIGHT), ("gpt2", NF4)])
def test_the_probe_finds_the_same_layout(bases, family, quantization):
    policy = adapted(bases(family), quantization)
    plain = adapted(bases(family), None)
    results = choose_stream(policy)
    choose_stream(plain)
    assert (policy.stream, policy.shares_prompts) == (plain.stream, plain.shares_prompts) == ("prefix", True)
    assert all(result.gradient_difference < CLOSE for result in results)
    shared, gradient = logprobs_and_gradients(policy, "prefix")
    for stream in ("packed", "padded"):
        other, other_gradient = logprobs_and_gradients(policy, stream)
        assert relative(other, shared) < CLOSE and relative(other_gradient, gradient) < CLOSE


def test_the_reference_is_the_packed_model(bases):
    policy = adapted(bases("qwen2"), NF4, moved=False)
    policy.use_stream("prefix")
    micro = micro_of(rows(), "prefix", CPU)
    with torch.no_grad():
        fresh = policy(micro).logprob_N
        with adapter_off(policy):
            assert torch.equal(policy(micro).logprob_N, fresh)
    moved = adapted(bases("qwen2"), NF4)
    moved.use_stream("prefix")
    with torch.no_grad():
        assert not torch.equal(moved(micro).logprob_N, fresh)
        with adapter_off(moved):
            assert torch.equal(moved(micro).logprob_N, fresh)


@pytest.mark.parametrize("kind", ["nf4-single", "dora", "dora-8-bit", "turned-round"])
def test_whole_weights_are_the_packed_numbers_with_the_update(bases, tmp_path, kind):
    family, quantization, settings = KINDS[kind]
    policy = adapted(bases(family), quantization, settings)
    oracle = adapted(unpacked_copy(policy, bases(family), tmp_path / "plain"), None, settings)
    expected = dict(plain_weights(oracle))
    found = dict(plain_weights(policy))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], expected[n], rtol=CLOSE, atol=1e-6) for n in expected)


def test_nothing_is_merged(bases):
    policy = adapted(bases("llama"), replace(NF4, storage="float32"))
    with merged(policy):
        assert not any(layer.merged for layer in policy.adapter.layers)
    with pytest.raises(AssertionError):
        merge_into_base(policy)


def test_a_checkpoint_is_an_adapter_that_says_how_its_base_was_packed(bases, tmp_path):
    from peft import PeftModel

    policy = adapted(bases("llama"), replace(NF4, is_nested=False))
    save_policy(policy, bases("llama"), tmp_path / "adapter")
    assert adapter_quantization(tmp_path / "adapter") == {
        "quant_bits": "4",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
    }
    words = json.loads((tmp_path / "adapter" / "quantization_config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        bases("llama"), dtype=FP32, quantization_config=transformers.BitsAndBytesConfig.from_dict(words)
    )
    for layer in theirs.modules():
        # Where the CPU multiplies in bfloat16, bitsandbytes 0.50 sorts the bytes of a model in evaluation
        # mode anew, and fails where a layer's inputs are no multiple of 64.
        layer.support_avx512bf16_for_cpu = False
    theirs = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    tokens = torch.tensor([rows()[0].token_ids])
    again = adapted(
        bases("llama"), replace(NF4, is_nested=False), adapter=tmp_path / "adapter", moved=False, seed=9
    )
    with torch.no_grad():
        assert relative(again.model(tokens).logits, theirs(tokens).logits) < CLOSE
        assert torch.equal(again.model(tokens).logits, policy.model(tokens).logits)


@pytest.mark.parametrize("quantization", [NF4, EIGHT], ids=str)
def test_a_model_that_is_stored_packed(bases, tmp_path, quantization):
    """As others have saved it, and to sample from alone."""
    said = {**quantization.as_json(), "llm_int8_skip_modules": ["lm_head"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bases("llama"), dtype=FP32, quantization_config=transformers.BitsAndBytesConfig.from_dict(said)
    )
    model.save_pretrained(tmp_path)
    stored, packed = adapted(tmp_path, quantization), adapted(bases("llama"), quantization)
    for one, other in zip(logprobs_and_gradients(stored), logprobs_and_gradients(packed), strict=True):
        assert torch.equal(one, other)
    sampler = load_policy(tmp_path, device=CPU, disable_dropout=True, quantization=quantization).eval()
    tokens = torch.tensor([rows()[0].token_ids])
    packed.use_stream("padded")
    with torch.no_grad(), adapter_off(packed):
        assert torch.equal(sampler.model(tokens).logits, packed.model(tokens).logits)
    weights = dict(plain_weights(sampler))
    plain = dict(random_model("llama").named_parameters())
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in plain.items()}


# The usual options of ms-swift beside a run that computes in float32.
IN_BF16 = replace(NF4, compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("quantization", "dtype", "coarsest"),
    [
        (NF4, FP32, FP32),
        (NF4, BF16, BF16),
        (IN_BF16, FP32, BF16),
        (replace(NF4, compute_dtype="float32"), BF16, BF16),
        (replace(NF4, compute_dtype="float16"), FP32, torch.float16),
        (replace(NF4, compute_dtype="float16"), BF16, BF16),
        (EIGHT, FP32, FP32),
    ],
)
def test_the_coarsest_of_the_dtypes_of_run_and_packed_layers_counts(tmp_path, quantization, dtype, coarsest):
    random_model("llama").save_pretrained(tmp_path)
    assert coarsest_dtype(adapted(tmp_path, quantization, dtype=dtype), dtype) == coarsest


def steep_model(directory):
    """A Llama whose weights are large enough that the roundings of its layers are seen at the end."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=320, initializer_range=0.3, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_packed_layers_that_multiply_in_bfloat16_keep_the_best_layout(tmp_path):
    """They round by far more than float32; that is no leak from row to row."""
    stream, shares_prompts, results = widest_stream(adapted(steep_model(tmp_path), IN_BF16))
    assert (stream, shares_prompts) == ("prefix", True)
    # Beyond what a run in float32 allows itself.
    assert max(max(r.value_difference, r.gradient_difference) for r in results) > 1e-3


def test_a_leak_between_rows_is_found_beside_such_layers(tmp_path, monkeypatch):
    def ignores_segments(layout, layer, query, key, value, options):
        return attend_masked(query, key, value, None, options)

    policy = adapted(steep_model(tmp_path), IN_BF16)
    monkeypatch.setattr(attention.StreamLayout, "attend", ignores_segments)
    assert widest_stream(policy)[:2] == ("padded", False)
