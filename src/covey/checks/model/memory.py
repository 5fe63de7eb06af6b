"""What the memory forecast needs: the sizes of the model, and the memory that is free on this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from covey.checks.run.devices import free_gpu_memory
from covey.data.model_files import read_json
from covey.media.families import FAMILIES, text_config
from covey.media.parts import has_parts, is_frozen
from covey.models.adapter_shapes import LoraFacts, ModelShapes
from covey.plan.facts import ModelSizes, VisionSizes
from covey.types.media import Part

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Of a container: limit, use, statistics and what of them can be dropped, by version 2 and version 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
# The names of older architectures, as transformers' attribute maps have them.
_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
_USUAL_MLP = 4
# Of towers of SigLIP, where config.json does not say.
_LAYERS = 12
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def model_sizes(
    directory: Path, shapes: ModelShapes, lora: LoraFacts, frozen: Collection[Part] = ()
) -> ModelSizes | None:
    """The sizes of the model of a directory; `lora` are the adapters that it has or would have, `frozen` the
    parts of a model that sees images which stay as they are without adapters.

    None where config.json does not say how wide the model is.
    """
    config = read_json(directory / "config.json")
    text = text_config(config)
    hidden, layers, heads = (_number(text, name) for name in list(_NAMES)[:3])
    if hidden is None or layers is None or heads is None or shapes.vocab_size is None:
        return None
    intermediate = _number(text, "intermediate_size") or _USUAL_MLP * hidden
    experts = _number(text, "num_experts_per_tok")
    if experts is not None:
        intermediate = experts * (_number(text, "moe_intermediate_size") or intermediate)
    return ModelSizes(
        family=str(config.get("model_type")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads") or heads,
        head_width=_number(text, "head_dim") or hidden // heads,
        intermediate=intermediate,
        vocabulary=shapes.vocab_size,
        tied=shapes.tied,
        parameters=lora.num_base,
        adapted=tuple(sorted({name.rpartition(".")[2] for name in lora.targets})),
        adapted_parameters=sum(math.prod(shapes.tensors[f"{name}.weight"]) for name in lora.targets),
        adapter_parameters=lora.num_lora,
        saved_parameters=lora.num_saved,
        packable_parameters=lora.num_packable,
        seeing_parameters=_count(shapes, ("vit", "aligner")),
        frozen_parameters=_count(shapes, frozen),
        frozen_text=has_parts(shapes.family) and "llm" in frozen,
        vision=_vision_sizes(config, hidden),
        is_joined=any(_ONE_EXPERT.search(name) for name in shapes.tensors),
    )


def _vision_sizes(config: dict[str, Any], text_hidden: int) -> VisionSizes | None:
    """The sizes of the vision tower that a config.json describes; None without one that covey knows."""
    vision: dict[str, Any] = config.get("vision_config") or {}
    if config.get("model_type") not in FAMILIES or not vision:
        return None
    # Qwen2-VL has the name for what the tower gives.
    hidden = _number(vision, "embed_dim") or _number(vision, "hidden_size")
    depth = _number(vision, "depth") or _number(vision, "num_hidden_layers") or _LAYERS
    if hidden is None:
        return None
    patch = _number(vision, "patch_size") or 14
    frames, merge = _number(vision, "temporal_patch_size") or 2, _number(vision, "spatial_merge_size") or 2
    if "depth" not in vision:
        frames, merge = 1, _number(config, "scale_factor") or 2
        if tokens := _number(config, "mm_tokens_per_image"):
            merge = max(1, (_number(vision, "image_size") or 896) // patch // math.isqrt(tokens))
    merged = merge**2
    deep = len(vision.get("deepstack_visual_indexes") or ())
    return VisionSizes(
        depth=depth,
        hidden=hidden,
        heads=_number(vision, "num_heads") or _number(vision, "num_attention_heads") or 16,
        intermediate=_number(vision, "intermediate_size") or _USUAL_MLP * hidden,
        patch_numbers=3 * frames * patch**2,
        features=(1 + deep) * text_hidden // merged,
        is_gated=config["model_type"] == "qwen2_5_vl",
        is_siglip="depth" not in vision,
    )


def _count(shapes: ModelShapes, parts: Collection[Part]) -> int:
    """Return the weights of parts of a model that sees images; 0 of another model."""
    named = shapes.tensors.items()
    return sum(math.prod(shape) for name, shape in named if is_frozen(name, shapes.family, parts))


def _number(config: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number under a name or an older one of it."""
    for spelling in (name, *_NAMES.get(name, ())):
        value = config.get(spelling)
        if isinstance(value, int) and value > 0:
            return value
    return None


def free_memory(*, cuda: bool) -> int | None:
    """Bytes that are free: of the GPU with the least, else of this machine or its container; None where
    nobody says."""
    if cuda:
        return free_gpu_memory()
    found = [n for n in (_available(), _free_of_group()) if n is not None]
    return min(found) if found else None


def _available() -> int | None:
    """Return the bytes that programs can have without swapping, by the kernel's estimate."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _free_of_group() -> int | None:
    """What is left of a container's limit; pages of files that nobody has open do not count as used."""
    for limit, usage, statistics, droppable in _GROUP_FILES:
        try:
            most, used = (int((_CGROUP / name).read_text(encoding="ascii")) for name in (limit, usage))
            lines = (line.split() for line in (_CGROUP / statistics).read_text(encoding="ascii").splitlines())
            return max(0, most - used + next(int(n) for name, n in lines if name == droppable))
        except (OSError, ValueError, StopIteration):
            continue
    return None
