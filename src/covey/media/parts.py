"""The parts of a model that sees images, told apart by the names of its tensors and modules.

Names may be those in a model, around an adapter, or in files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from covey.texts import tr
from covey.types.media import PARTS, Part

IN_WORDS: Mapping[Part, str] = {
    "vit": tr("vision tower"),
    "aligner": tr("aligner"),
    "llm": tr("language model"),
}
"""The parts, as people are told of them."""

# The modules of each part; what is in none of them is the language model, with its embedding and its head.
# The aligner turns what the vision tower sees into what the language model reads.
_QWEN: Mapping[Part, tuple[str, ...]] = {
    "aligner": ("visual.merger", "visual.deepstack_merger_list"),
    "vit": ("visual",),
}
_MODULES: Mapping[str, Mapping[Part, tuple[str, ...]]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": {"aligner": ("multi_modal_projector",), "vit": ("vision_tower",)},
    "smolvlm": {"aligner": ("connector",), "vit": ("vision_model",)},
}
# How names in files begin, and how those in the model do instead.
_OF_QWEN = {
    "visual.": "model.visual.",
    "model.visual.": "model.visual.",
    "model.language_model.": "model.language_model.",
    "model.": "model.language_model.",
}
_IN_MODEL: Mapping[str, Mapping[str, str]] = {
    "qwen2_vl": _OF_QWEN,
    "qwen2_5_vl": _OF_QWEN,
    "qwen3_vl": _OF_QWEN,
    "gemma3": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


def has_parts(family: str | None) -> bool:
    """Return whether a model of this `model_type` has a vision tower that is known here."""
    return family in _MODULES


def name_in_model(name: str, family: str | None) -> str:
    """Return the name that a tensor of a file has in the model.

    Files of Qwen have `visual.` and `model.layers.` where the model has `model.visual.` and
    `model.language_model.layers.`.
    """
    known = _IN_MODEL.get(family or "", {})
    begin = next((begin for begin in known if name.startswith(begin)), None)
    return name if begin is None else known[begin] + name.removeprefix(begin)


def part_of(name: str, family: str | None) -> Part:
    """Return the part that a tensor or a module belongs to; `llm` in a model of text.

    `part_of("model.visual.merger.mlp.0.weight", "qwen2_5_vl")` is `aligner`.
    """
    within = f".{name}."
    for part, modules in _MODULES.get(family or "", {}).items():
        if any(f".{module}." in within for module in modules):
            return part
    return "llm"


def is_frozen(name: str, family: str | None, frozen: Collection[Part]) -> bool:
    """Return whether a tensor or a module belongs to one of the `frozen` parts; False in a model of text."""
    return has_parts(family) and part_of(name, family) in frozen


def frozen_parts(options: Mapping[str, Any]) -> frozenset[Part]:
    """Return the parts that options of a run freeze; none where `options` are those of a saved adapter."""
    return frozenset(part for part in PARTS if options.get(f"freeze_{part}"))
