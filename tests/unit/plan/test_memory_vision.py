"""The forecast of the vision tower's memory is what autograd holds of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from covey.checks.model.memory import _vision_sizes
from covey.models.vision.tower import Pixels, Vision
from covey.plan.activations import Training
from covey.plan.memory_vision import kept_seeing_bytes, seeing_bytes
from support import squares
from support.vision import FAMILIES, config_of

SIDE = 16 * 14
HOW = Training(full=True, recompute="none", rank=0, dora=False, cuda=False, offload=False, element=4)


def tower_of(family: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """A tower that is large enough for what it holds to be no matter of small tensors, and its config."""
    config = config_of(family)
    vision = config.vision_config
    vision.depth, vision.num_heads, vision.patch_size = 4, 4, 14
    if family == "qwen2_vl":
        vision.embed_dim, vision.mlp_ratio = 256, 4
    else:
        vision.hidden_size, vision.intermediate_size = 256, 684
    if family == "qwen2_5_vl":
        vision.window_size, vision.fullatt_block_indexes = 112, [1, 3]
    config.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory)).model, written


def squares_of(family: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """The same of a tower that takes squares of 16 by 16 patches."""
    config = squares.config_of(family)
    vision = config.vision_config
    vision.num_hidden_layers, vision.num_attention_heads, vision.patch_size = 4, 4, 14
    vision.hidden_size, vision.intermediate_size, vision.image_size = 256, 684, SIDE
    if family == "gemma3":
        config.mm_tokens_per_image = 64
    config.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory)).model, written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", (*FAMILIES, *squares.FAMILIES))
def test_what_the_tower_keeps_is_forecast(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, config = tower_of(family, tmp_path) if family in FAMILIES else squares_of(family, tmp_path)
    model.to(dtype)
    sizes = _vision_sizes(config, config["text_config"]["hidden_size"])
    assert sizes is not None
    patches = 1024
    if family in FAMILIES:
        patches_PC = torch.randn(patches, sizes.patch_numbers).to(dtype)
        pixels = Pixels(patches_PC, torch.tensor([[1, 24, 32], [1, 16, 16]]))
    else:
        patches_PC = torch.randn(4, 3, SIDE, SIDE).to(dtype)
        pixels = Pixels(patches_PC, torch.tensor([[1, 32, 32]]))
    vision = Vision.of(model)
    assert vision is not None
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {patches_PC.untyped_storage().data_ptr(): 0}

    def pack(kept: torch.Tensor) -> torch.Tensor:
        storage = kept.untyped_storage()
        if storage.data_ptr() not in weights:
            held.setdefault(storage.data_ptr(), storage.nbytes())
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = vision.seen(model, pixels)
    how = replace(HOW, element=dtype.itemsize)
    found = kept_seeing_bytes(sizes, patches, how)
    assert 0.85 < found / sum(held.values()) < 1.2
    assert out is not None
    assert kept_seeing_bytes(sizes, patches, replace(how, recompute="full")) < found / 4
    assert 0 < seeing_bytes(sizes, patches, how) < found


def test_a_model_that_sees_nothing_has_no_tower() -> None:
    assert _vision_sizes({"model_type": "qwen2"}, 64) is None
