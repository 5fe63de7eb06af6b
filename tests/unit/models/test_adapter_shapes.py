"""What headers of weight files tell of an adapter, against peft's own on models of every family."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from covey.errors import CheckpointError
from covey.models.adapter_shapes import (
    LoraSettings,
    ModelShapes,
    adapter_settings,
    facts_of,
    lora_facts,
    read_shapes,
)
from covey.models.load import load_adapted, save_policy
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, random_model, save_model

LORA = LoraSettings(rank=4, alpha=8)


def adapted(directory, settings, **changes):
    options = {
        "adapter": None,
        "seed": 0,
        "compute_dtype": torch.float32,
        "device": torch.device("cpu"),
        "disable_dropout": True,
    }
    return load_adapted(directory, settings, **{**options, **changes})


def trainable(policy):
    return sum(p.numel() for p in policy.parameters() if p.requires_grad)


def by_hand(*names, vocab_size=10, tied=False, **shapes):
    """Shapes of a toy model: two layers with q_proj (6, 4) and a norm, and what else is named."""
    tensors = {"model.embed_tokens.weight": (10, 4)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.attn.q_proj.weight"] = (6, 4)
        tensors[f"model.layers.{layer}.norm.weight"] = (4,)
    if not tied:
        tensors["lm_head.weight"] = (10, 4)
    tensors |= dict.fromkeys(names, (6, 4))
    return ModelShapes(tensors=tensors | shapes, vocab_size=vocab_size, tied=tied)


# -- against peft ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", [*STREAM_FAMILIES, *LEAKING_FAMILIES])
def test_the_count_is_what_peft_makes_trainable(family, use_dora, tmp_path):
    settings = LoraSettings(rank=4, alpha=8, use_dora=use_dora)
    save_model(family, tmp_path / "base")
    facts = lora_facts(tmp_path / "base", settings)
    policy = adapted(tmp_path / "base", settings)
    assert facts.num_lora == trainable(policy) > 0
    assert facts.targets == policy.adapter.facts.targets
    assert facts.num_base == sum(p.numel() for p in random_model(family).parameters())
    # What a forecast is for: the bytes of the file that is saved.
    save_policy(policy, tmp_path / "base", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert facts.num_lora == sum(t.numel() for t in saved.values())
    assert (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size >= 4 * facts.num_lora


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2", "lfm2", "qwen3_5"])
def test_all_linear_is_what_peft_takes_for_it(family, tmp_path):
    from peft import LoraConfig, get_peft_model

    save_model(family, tmp_path)
    handle = get_peft_model(
        random_model(family), LoraConfig(target_modules="all-linear", fan_in_fan_out=family == "gpt2")
    )
    assert sorted(handle.base_model.targeted_module_names) == list(lora_facts(tmp_path, LORA).targets)


def test_experts_and_router_are_left_out(tmp_path):
    # In the file each expert is three matrices; in the model they are fused, and peft's own all-linear would
    # adapt the fused tensors with a rank per expert.
    save_model("mixtral", tmp_path)
    assert any(".experts.3.w2." in name for name in read_shapes(tmp_path).tensors)
    facts = lora_facts(tmp_path, LORA)
    assert {t.rpartition(".")[2] for t in facts.targets} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name in ("w1", "gate"):
        refused = lora_facts(tmp_path, LoraSettings(rank=4, alpha=8, target_modules=(name,))).refused
        assert "fused" in refused[name]


def test_copies_are_counted_whole(tmp_path):
    save_model("llama", tmp_path)
    settings = LoraSettings(rank=4, alpha=8, modules_to_save=("lm_head", "embed_tokens", "norm"))
    facts = lora_facts(tmp_path, settings)
    assert facts.saved == ("lm_head", "model.embed_tokens", "model.norm")
    assert facts.num_saved == 2 * 320 * 64 + 64
    assert facts.num_lora + facts.num_saved == trainable(adapted(tmp_path, settings))


# -- by hand -----------------------------------------------------------------------------------------------


def test_counts_by_hand():
    # Two matrices of 6 x 4 at rank 3: 2 x 3 x (6 + 4) = 60; DoRA adds the 6 outputs of each.
    assert facts_of(by_hand(), LoraSettings(rank=3, alpha=6)).num_lora == 60
    assert facts_of(by_hand(), LoraSettings(rank=3, alpha=6, use_dora=True)).num_lora == 72
    # A bias tells that a matrix is stored inputs first.
    turned = by_hand(**{"model.layers.0.attn.q_proj.bias": (4,)})
    assert facts_of(turned, LoraSettings(rank=3, alpha=6, use_dora=True)).num_lora == 70


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("q_proj",), ["0", "1"]),
        (("attn.q_proj",), ["0", "1"]),
        (("layers.1.attn.q_proj",), ["1"]),
        (("all-linear",), ["0", "1"]),
    ],
)
def test_a_name_means_the_end_of_a_path(names, expected):
    facts = facts_of(by_hand(), LoraSettings(rank=1, alpha=1, target_modules=names))
    assert [t.split(".")[2] for t in facts.targets] == expected
    assert not facts.unmatched and not facts.refused


def test_a_name_that_fits_nothing_comes_with_the_nearest():
    settings = LoraSettings(
        rank=1, alpha=1, target_modules=("q_poj", "proj", "xyz"), modules_to_save=("lm_heads",)
    )
    facts = facts_of(by_hand(), settings)
    assert facts.unmatched == {
        "q_poj": ("q_proj",),
        "proj": ("q_proj",),
        "xyz": (),
        "lm_heads": ("lm_head",),
    }
    assert facts.targets == () and facts.num_lora == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lm_head", "use modules_to_save to train them completely"),
        ("embed_tokens", "use modules_to_save to train them completely"),
        ("norm", "two dimensions"),
    ],
)
def test_what_an_adapter_would_not_reach_is_refused(name, why):
    facts = facts_of(by_hand(), LoraSettings(rank=1, alpha=1, target_modules=("q_proj", name)))
    assert list(facts.refused) == [name] and why in facts.refused[name]


def test_an_unusual_embedding_is_known_by_its_rows():
    shapes = by_hand(**{"model.tokens.weight": (10, 4)})
    facts = facts_of(shapes, LORA)
    assert "model.tokens" not in facts.targets and len(facts.targets) == 2


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_one_tensor_for_head_and_embedding_is_not_copied(name):
    settings = LoraSettings(rank=1, alpha=1, modules_to_save=(name,))
    assert "one tensor" in facts_of(by_hand(tied=True), settings).refused[name]
    assert facts_of(by_hand(), settings).refused == {}


def test_all_linear_stands_alone():
    facts = facts_of(by_hand(), LoraSettings(rank=1, alpha=1, target_modules=("all-linear", "q_proj")))
    assert list(facts.refused) == ["all-linear"]


def test_a_module_trained_whole_has_no_adapter():
    facts = facts_of(by_hand(), LoraSettings(rank=1, alpha=1, modules_to_save=("q_proj",)))
    assert (facts.targets, facts.num_saved) == ((), 48)


def test_a_file_without_a_header_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors, 20 bytes long, has no header"):
        read_shapes(tmp_path)


# -- a saved adapter ---------------------------------------------------------------------------------------


def config(**changes):
    body = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    return json.dumps({**body, "base_model_name_or_path": "some/base", **changes})


def test_settings_of_a_saved_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(config(use_dora=True, modules_to_save=["lm_head"]))
    settings, base = adapter_settings(tmp_path)
    assert settings == LoraSettings(
        rank=4,
        alpha=8,
        target_modules=("q_proj", "v_proj"),
        modules_to_save=("lm_head",),
        use_dora=True,
    )
    assert str(base) == "some/base"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (config(peft_type="IA3"), "peft_type IA3"),
        (config(bias="all"), "bias all"),
        (config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        ('{"peft_type": "LORA"}', "cannot be read: KeyError"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_plain_lora_is_refused(text, words, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        adapter_settings(tmp_path)


def test_torch_is_not_needed():
    code = "import sys, covey.models.adapter_shapes; print(sorted({'torch', 'peft'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
