"""The bytes of a checkpoint, from the headers of the model's weight files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from covey.config.schema import Config
from covey.models.adapter_shapes import LoraFacts, ModelShapes

_ADAM_BYTES = 8
_FLOAT_BYTES = 4
# What lies beside the tensors: configurations, the manifest, counters, generators.
_SMALL_FILES = 12_000
_HEADER_PER_TENSOR = 100
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """Bytes of one checkpoint with everything a resume needs, and of one that is reduced to the model."""

    whole: int
    model: int


def checkpoint_sizes(
    config: Config, directory: Path, shapes: ModelShapes, lora: LoraFacts | None, *, has_bfloat16: bool
) -> CheckpointSizes:
    """What one checkpoint of this configuration takes; `has_bfloat16` is what torch_dtype auto goes by."""
    is_low = config.torch_dtype == "bfloat16" or (config.torch_dtype == "auto" and has_bfloat16)
    held = 2 if is_low else _FLOAT_BYTES
    total = sum(math.prod(shape) for shape in shapes.tensors.values())
    tensors = len(shapes.tensors)
    if lora is None:
        model = held * total + _HEADER_PER_TENSOR * tensors
        trained, with_masters = total, total if is_low else 0
    else:
        # Adapters are float32 whatever the base computes in; whole copies follow the rule of full training.
        model = _FLOAT_BYTES * lora.num_lora + held * lora.num_saved
        tensors = 2 * len(lora.targets) + len(lora.saved)
        model += 2 * _HEADER_PER_TENSOR * tensors
        trained, with_masters = lora.num_lora + lora.num_saved, lora.num_saved if is_low else 0
    model += _SMALL_FILES + sum(f.stat().st_size for f in _text_files(directory))
    if config.save_only_model:
        return CheckpointSizes(whole=model, model=model)
    state = _ADAM_BYTES * trained + _FLOAT_BYTES * with_masters + 3 * _HEADER_PER_TENSOR * tensors
    return CheckpointSizes(whole=model + state, model=model)


def _text_files(directory: Path) -> set[Path]:
    """The files of tokenizer and template that a checkpoint gets a copy of."""
    patterns = (*_TOKENIZER_FILES, "chat_template*")
    return {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
