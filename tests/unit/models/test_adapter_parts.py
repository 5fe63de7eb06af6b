"""Adapters on a model that sees images: what headers of its files tell, against what peft makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.media.parts import part_of
from covey.models.adapter_shapes import LoraSettings, facts_of, lora_facts, read_shapes
from covey.models.load import load_adapted
from covey.types.media import PARTS, Part
from support.vision import FAMILIES, save_model

FROZEN: tuple[tuple[Part, ...], ...] = ((), ("vit", "aligner"), ("vit",), ("llm",), ("aligner", "llm"))


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("frozen", FROZEN)
def test_the_count_is_what_peft_makes_trainable(base: Path, frozen: tuple[Part, ...]) -> None:
    settings = LoraSettings(rank=4, alpha=8, frozen=frozenset(frozen))
    facts, family = lora_facts(base, settings), read_shapes(base).family
    policy = load_adapted(
        base,
        settings,
        adapter=None,
        seed=0,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        disable_dropout=True,
    )
    assert policy.adapter is not None and policy.adapter.facts.targets == facts.targets
    assert facts.num_lora == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert {part_of(name, family) for name in facts.targets} == set(PARTS) - {*frozen}
    # An embedding of patches is a table, or a convolution; the head is the loss's.
    leaves = {name.rpartition(".")[2] for name in facts.targets}
    assert not leaves & {"pos_embed", "lm_head", "embed_tokens"}
    assert not any("patch_embed" in name for name in facts.targets)


def test_names_of_older_files_mean_the_same(base: Path, tmp_path: Path) -> None:
    """`visual.` and `model.layers.` stand there in the place of `model.visual.` and
    `model.language_model.layers.`; transformers writes these for some families still."""
    tensors = load_file(base / "model.safetensors")
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }
    new = {in_model(name): tensor for name, tensor in old.items()}
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    expected = read_shapes(base)
    for named in (old, new):
        save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert read_shapes(tmp_path) == expected
    assert old.keys() != new.keys() and expected.tensors.keys() == new.keys()


def in_model(name: str) -> str:
    """The name of a tensor in transformers' model, by hand."""
    if name == "lm_head.weight":
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}"


def test_names_decide_alone(base: Path) -> None:
    shapes = read_shapes(base)
    named = LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "qkv"))
    everything = facts_of(shapes, named)
    assert {part_of(n, shapes.family) for n in everything.targets} == {"vit", "llm"}
    frozen = LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "qkv"), frozen=frozenset(PARTS))
    assert facts_of(shapes, frozen).targets == everything.targets
