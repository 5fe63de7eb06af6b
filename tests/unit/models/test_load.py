"""Loading and saving: dropout silenced, weights and tokenizer carried, nothing of covey in what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.errors import ConfigError
from covey.models.load import choose_liger, choose_stream, load_policy, save_policy
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.quickstart.task import MODEL_DIR

CPU = torch.device("cpu")


@pytest.fixture
def dropping(tmp_path: Path, tiny_config) -> Path:
    """A saved GPT-2 (dropout modules) or Llama (a rate in the attention) with dropout, beside a tokenizer."""

    def make(family: str) -> Path:
        config = tiny_config(family)
        names = ("attn_pdrop", "resid_pdrop", "embd_pdrop") if family == "gpt2" else ("attention_dropout",)
        for name in names:
            setattr(config, name, 0.25)
        torch.manual_seed(0)
        target = tmp_path / family
        AutoModelForCausalLM.from_config(config).save_pretrained(target)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (target / name).write_bytes((MODEL_DIR / name).read_bytes())
        return target

    return make


def load(directory: Path, *, disable_dropout: bool = True) -> Policy:
    return load_policy(directory, device=CPU, disable_dropout=disable_dropout)


@pytest.mark.parametrize("kind", ["padded", "prefix"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_is_silenced_in_training_mode(family, kind, dropping, random_rows):
    micro = micro_of(random_rows((11, (7, 4)), (6, (9, 5))), kind, CPU)
    values = {}
    for disable in (True, False):
        policy = load(dropping(family), disable_dropout=disable)
        policy.use_stream(kind)
        assert policy.training
        values[disable] = [policy(micro).logprob_N.detach() for _ in range(2)]
        policy.eval()
        values[disable].append(policy(micro).logprob_N.detach())
    assert torch.equal(*values[True][:2])
    # Training and evaluation are the same function: the ratio before an update is 1.
    assert torch.equal(values[True][1], values[True][2])
    assert not torch.equal(*values[False][:2])


def test_what_is_loaded_is_float32_on_padded_rows(dropping):
    policy = load(dropping("llama"))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.stream == "padded"
    assert [r.passed for r in choose_stream(policy)] == [True, True]
    assert policy.stream == "prefix"


def test_half_precision_weights_are_loaded_in_float32(tmp_path, tiny_model):
    model = tiny_model("llama").bfloat16()
    model.save_pretrained(tmp_path)
    policy = load(tmp_path)
    saved = dict(model.named_parameters())
    assert all(torch.equal(p, saved[n].float()) for n, p in policy.model.named_parameters())


def test_no_activation_is_recomputed_unless_a_policy_is_told_so(dropping):
    policy = load(dropping("llama"))
    assert not policy.model.is_gradient_checkpointing
    policy.keep_activations("full")
    assert policy.model.is_gradient_checkpointing


def test_auto_takes_masked_rows_where_flex_attention_cannot_be_had(dropping, monkeypatch):
    policy = load(dropping("llama"))
    choose_stream(policy, "auto")
    assert (policy.attention, policy.stream) == ("sdpa", "prefix")
    # On a CPU torch refuses the backward pass of flex attention, as a compiler would refuse a model.
    monkeypatch.setattr("covey.models.load.automatic", lambda device: "flex")
    choose_stream(policy, "auto")
    assert (policy.attention, policy.stream) == ("sdpa", "prefix")
    with pytest.raises(NotImplementedError):
        choose_stream(policy, "flex")


@pytest.mark.parametrize("kind", ["flash_attn", "eager"])
def test_attention_asked_for_by_name_is_taken(kind, dropping):
    policy = load(dropping("llama"))
    assert [r.stream for r in choose_stream(policy, kind)] == ["prefix", "prefix"]
    assert (policy.attention, policy.stream, policy.shares_prompts) == (kind, "prefix", True)


def test_liger_is_put_in_where_it_is_asked_for(dropping, monkeypatch):
    policy = load(dropping("llama"))
    choose_liger(policy, "auto")
    choose_liger(policy, "false")
    assert not policy.has_liger
    monkeypatch.setattr("covey.models.load.use_liger", lambda model: 7)
    choose_liger(policy, "true")
    assert policy.has_liger


@pytest.mark.parametrize("stream", ["padded", "prefix"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_saved_and_loaded(family, stream, dropping, tmp_path):
    source, target = dropping(family), tmp_path / "saved"
    policy = load(source)
    policy.use_stream(stream)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    save_policy(policy, source, target)

    again = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert again.config._attn_implementation != "covey"
    weights = dict(policy.model.named_parameters())
    assert weights.keys() == dict(again.named_parameters()).keys()
    assert all(torch.equal(p, weights[n]) for n, p in again.named_parameters())
    ids = torch.arange(3, 20)[None]
    policy.use_stream("padded")
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, policy.eval().model(ids).logits)

    text = (target / "config.json").read_text()
    assert "covey" not in text
    before, after = json.loads((source / "config.json").read_text()), json.loads(text)
    rates = {k: v for k, v in before.items() if "drop" in k}
    assert 0.25 in rates.values()
    assert {k: after[k] for k in rates} == rates
    assert list(target.glob("*.safetensors"))
    assert not list(target.glob("*.bin"))


def test_tokenizer_files_are_carried_as_they_are(tmp_path):
    policy = load(MODEL_DIR)
    save_policy(policy, MODEL_DIR, tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (MODEL_DIR / name).read_bytes()
    one, two = (AutoTokenizer.from_pretrained(d) for d in (MODEL_DIR, tmp_path / "saved"))
    messages = [{"role": "user", "content": "What is 1+2?"}]
    rendered = [
        t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (one, two)
    ]
    assert rendered[0] == rendered[1]
    assert one.get_vocab() == two.get_vocab()


def test_generation_settings_survive(tmp_path):
    save_policy(load(MODEL_DIR), MODEL_DIR, tmp_path / "saved")
    one, two = (
        json.loads((d / "generation_config.json").read_text()) for d in (MODEL_DIR, tmp_path / "saved")
    )
    assert two["eos_token_id"] == one["eos_token_id"]


def test_weights_that_are_not_safetensors_are_refused(tmp_path, tiny_model):
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load(tmp_path)


def test_a_weight_that_is_missing_starts_from_no_random_numbers(tmp_path, tiny_model):
    tiny_model("gemma2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(n for n in tensors if n.endswith("q_proj.weight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    (found,) = raised.value.problems
    assert found.code == "E372"
    assert lost in found.seen


def test_weights_begin_where_torch_puts_them(tmp_path, tiny_model):
    """And not where they begin in a file, which depends on its header and decides how products round."""
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for words in range(8):
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt", "said": 8 * words * "x"})
        policy = load_policy(tmp_path, device=CPU, disable_dropout=True)
        assert {p.data_ptr() % 64 for p in policy.parameters()} == {0}
