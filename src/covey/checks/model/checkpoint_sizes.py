"""The bytes of a checkpoint, from the headers of the model's weight files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path

from covey.config.quantization import quantization_of
from covey.media.parts import is_frozen
from covey.models.adapter_shapes import LoraFacts, ModelShapes
from covey.options.schema import Config

_ADAM_BYTES = 8
_FLOAT_BYTES = 4
# What lies beside the tensors: configurations, the manifest of the model, counters, what the rules have seen
# of a first few steps (some 100 kB later on), and a generator a rank.
_MODEL_FILES = 2_100
_STATE_FILES = 5_200
_GENERATOR_BYTES = 10_130
# Of a tensor a header has the name, and some 60 bytes of dtype, shape and place.
_ENTRY_BYTES = 62
# A replayed group's completion as a record: what stands once, and a token's id, logprob, mask and version.
_RECORD_BYTES = 1_500
_TOKEN_BYTES = 40
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """Bytes of one checkpoint with everything a resume needs, and of one that is reduced to the model."""

    whole: int
    model: int


def checkpoint_sizes(
    config: Config,
    directory: Path,
    shapes: ModelShapes,
    lora: LoraFacts | None,
    *,
    num_processes: int,
    has_bfloat16: bool,
) -> CheckpointSizes:
    """What one checkpoint of this configuration takes; `has_bfloat16` is what torch_dtype auto goes by."""
    is_low = config.torch_dtype == "bfloat16" or (config.torch_dtype == "auto" and has_bfloat16)
    held = 2 if is_low else _FLOAT_BYTES
    if lora is None:
        saved_names, parts = list(shapes.tensors), config.frozen_parts
        trained_names = [name for name in saved_names if not is_frozen(name, shapes.family, parts)]
        trained = sum(math.prod(shapes.tensors[name]) for name in trained_names)
        tensors = held * sum(math.prod(shape) for shape in shapes.tensors.values())
        low = trained if is_low else 0
    else:
        # Adapters are float32 whatever the base computes in; whole copies follow the rule of full training.
        trained, low = lora.num_lora + lora.num_saved, lora.num_saved if is_low else 0
        tensors = _FLOAT_BYTES * lora.num_lora + held * lora.num_saved
        saved_names = _adapter_names(
            lora, config, "base_model.model.{}.{}.weight", "base_model.model.{}.weight"
        )
        trained_names = _adapter_names(
            lora, config, "{}.{}.default.weight", "{}.modules_to_save.default.weight"
        )
    model = tensors + _header(saved_names) + _MODEL_FILES
    quantization = quantization_of(config) if lora is not None else None
    model += 0 if quantization is None else len(json.dumps(quantization.as_json(), indent=2))
    model += sum(f.stat().st_size for f in _text_files(directory))
    if config.save_only_model:
        return CheckpointSizes(whole=model, model=model)
    keys = [f"{kind}/model.{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in trained_names]
    state = _ADAM_BYTES * trained + _FLOAT_BYTES * (low + len(trained_names)) + _header(keys)
    if config.sync_ref_model:
        state += _FLOAT_BYTES * trained + _header([f"model.{name}" for name in trained_names])
    listed = sum(len(key) + 4 for key in keys)
    record = _RECORD_BYTES + _TOKEN_BYTES * config.most_tokens
    replayed = config.replay_buffer_size * config.num_generations * record
    return CheckpointSizes(
        whole=model + state + listed + replayed + _STATE_FILES + num_processes * _GENERATOR_BYTES, model=model
    )


def _header(names: Sequence[str]) -> int:
    """Bytes of the header of a safetensors file with tensors of these names."""
    return sum(len(name) + _ENTRY_BYTES for name in names)


def _adapter_names(lora: LoraFacts, config: Config, matrix: str, copy: str) -> list[str]:
    kinds = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if config.use_dora else [])]
    return [matrix.format(m, k) for m in lora.targets for k in kinds] + [copy.format(m) for m in lora.saved]


def _text_files(directory: Path) -> set[Path]:
    """The files of tokenizer and template that a checkpoint gets a copy of."""
    patterns = (*_TOKENIZER_FILES, "chat_template*", "additional_chat_templates/*")
    return {file for pattern in patterns for file in directory.glob(pattern) if isfile(file)}
