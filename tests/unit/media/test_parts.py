"""The parts of a model that sees images, by the names of its tensors."""

from __future__ import annotations

from typing import get_args

import pytest

from covey.config import from_dict
from covey.media.families import FAMILIES
from covey.media.parts import IN_WORDS, frozen_parts, has_parts, is_frozen, part_of
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
    for family in FAMILIES:
        assert part_of(name, family) == part
        assert [p for p in PARTS if is_frozen(name, family, {p})] == [part]
    # A model of text has no parts, whatever its modules are called.
    assert part_of(name, "qwen2") == part_of(name, None) == "llm"
    assert not is_frozen(name, "qwen2", PARTS)


def test_every_family_that_sees_has_parts() -> None:
    assert all(map(has_parts, FAMILIES)) and not has_parts("qwen2") and not has_parts(None)
    assert set(PARTS) == set(get_args(Part)) == IN_WORDS.keys()


def test_options_say_which_parts_are_frozen() -> None:
    run = {"model": "m", "dataset": "d", "reward_funcs": ["accuracy"], "freeze_llm": True, "freeze_vit": True}
    config = from_dict(run).config
    assert config.frozen_parts == frozen_parts(config.model_dump()) == {"vit", "llm"}
    assert frozen_parts({"lora_rank": 8}) == frozenset()
