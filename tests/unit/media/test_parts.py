"""The parts of a model that sees images, by the names of its tensors."""

from __future__ import annotations

from typing import get_args

import pytest

from covey.config import from_dict
from covey.media.families import FAMILIES
from covey.media.parts import IN_WORDS, frozen_parts, has_parts, is_frozen, name_in_model, part_of
from covey.types.media import PARTS, Part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.blocks.0.attn.qkv.weight", "vit"),
        ("model.visual.patch_embed.proj.weight", "vit"),
        ("model.model.visual.pos_embed.weight", "vit"),
        ("visual.merger.mlp.0.weight", "aligner"),
        ("model.visual.merger.ln_q.weight", "aligner"),
        ("model.visual.deepstack_merger_list.1.linear_fc1.bias", "aligner"),
        ("model.model.visual.blocks.3.mlp.up_proj.lora_A.default.weight", "vit"),
        ("model.model.visual.merger.mlp.2.base_layer.weight", "aligner"),
        ("model.visual.merger", "aligner"),
        ("model.visual.mergers.weight", "vit"),
        ("model.language_model.embed_tokens.weight", "llm"),
        ("model.layers.0.self_attn.q_proj.weight", "llm"),
        ("model.visually.layers.0.weight", "llm"),
        ("lm_head.weight", "llm"),
    ],
)
def test_the_part_of_a_tensor(name: str, part: Part) -> None:
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        assert part_of(name, family) == part
        assert [p for p in PARTS if is_frozen(name, family, {p})] == [part]
    # A model of text has no parts, whatever its modules are called.
    assert part_of(name, "qwen2") == part_of(name, None) == "llm"
    assert not is_frozen(name, "qwen2", PARTS)


@pytest.mark.parametrize(
    ("family", "name", "in_model", "part"),
    [
        ("gemma3", "vision_tower.post_layernorm.bias", "model.vision_tower.post_layernorm.bias", "vit"),
        (
            *("gemma3", "multi_modal_projector.mm_soft_emb_norm.weight"),
            *("model.multi_modal_projector.mm_soft_emb_norm.weight", "aligner"),
        ),
        ("gemma3", "language_model.model.norm.weight", "model.language_model.norm.weight", "llm"),
        ("gemma3", "language_model.lm_head.weight", "lm_head.weight", "llm"),
        ("smolvlm", "model.vision_model.encoder.a", "model.vision_model.encoder.a", "vit"),
        ("smolvlm", "model.connector.proj.weight", "model.connector.proj.weight", "aligner"),
        ("smolvlm", "model.text_model.norm.weight", "model.text_model.norm.weight", "llm"),
        ("qwen2_vl", "visual.merger.mlp.0.weight", "model.visual.merger.mlp.0.weight", "aligner"),
        ("qwen2_vl", "model.layers.0.mlp.weight", "model.language_model.layers.0.mlp.weight", "llm"),
        ("qwen3_vl", "model.language_model.norm.weight", "model.language_model.norm.weight", "llm"),
    ],
)
def test_names_in_files_and_in_models(family: str, name: str, in_model: str, part: Part) -> None:
    assert name_in_model(name, family) == in_model
    assert part_of(name, family) == part_of(in_model, family) == part


def test_every_family_that_sees_has_parts() -> None:
    assert all(map(has_parts, FAMILIES)) and not has_parts("qwen2") and not has_parts(None)
    assert set(PARTS) == set(get_args(Part)) == IN_WORDS.keys()


def test_options_say_which_parts_are_frozen() -> None:
    run = {"model": "m", "dataset": "d", "reward_funcs": ["accuracy"], "freeze_llm": True, "freeze_vit": True}
    config = from_dict(run).config
    assert config.frozen_parts == frozen_parts(config.model_dump()) == {"vit", "llm"}
    assert frozen_parts({"lora_rank": 8}) == frozenset()
