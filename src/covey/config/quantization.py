"""How bitsandbytes quantizes the weights of a model: by the options of a run, by an adapter's directory, or
by the config.json of a model that is stored quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.options.schema import Config
from covey.texts import tr

QUANTIZATION_FILE = "quantization_config.json"
"""Beside an adapter: how its base was quantized, as transformers' BitsAndBytesConfig says it."""

OF_FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
"""The options of 4-bit weights beside their number of bits."""

_BITSANDBYTES = ("bitsandbytes", "bnb")
# Weights that share a scale, and scales that share one of the second level.
_BLOCK, _NESTED_BLOCK = 64, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Weights of 4 or 8 bits; the other fields are of 4 alone. `compute_dtype` auto is that of the run."""

    bits: int
    kind: str = "nf4"
    is_nested: bool = True
    storage: str = "uint8"
    compute_dtype: str = "auto"

    @property
    def bits_per_weight(self) -> float:
        """With the scales of blocks; 8-bit weights have one scale a row, which is not counted."""
        if self.bits == 8:
            return 8.0
        return 4 + (8 / _BLOCK + 32 / (_BLOCK * _NESTED_BLOCK) if self.is_nested else 32 / _BLOCK)

    @property
    def in_words(self) -> str:
        """As in `4 bits (nf4, double quantization)`."""
        double = tr(", double quantization") if self.is_nested else ""
        return tr("{bits} bits", bits=self.bits) + (f" ({self.kind}{double})" if self.bits == 4 else "")

    def as_json(self) -> dict[str, Any]:
        """Return what BitsAndBytesConfig.from_dict takes."""
        said: dict[str, Any] = {"quant_method": _BITSANDBYTES[0], f"load_in_{self.bits}bit": True}
        if self.bits == 4:
            said |= zip(OF_FOUR_BITS, (self.kind, self.is_nested, self.storage), strict=True)
        return said


def quantization_of(config: Config) -> Quantization | None:
    """How a run quantizes its base; None where it does not, or not with bitsandbytes."""
    if config.quant_bits is None or config.quant_method != "bnb":
        return None
    return Quantization(
        bits=int(config.quant_bits),
        kind=config.bnb_4bit_quant_type,
        is_nested=config.bnb_4bit_use_double_quant,
        storage=config.bnb_4bit_quant_storage,
        compute_dtype=config.bnb_4bit_compute_dtype,
    )


def options_of(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options that a quantization_config stands for; None where it is not one of bitsandbytes."""
    if said.get("quant_method", _BITSANDBYTES[0]) not in _BITSANDBYTES:
        return None
    if said.get("load_in_8bit"):
        return {"quant_bits": "8"}
    if not said.get("load_in_4bit"):
        return None
    # The defaults of transformers.
    usual = dict(zip(OF_FOUR_BITS, ("fp4", False, "uint8"), strict=True))
    return {"quant_bits": "4"} | {name: said.get(name, value) for name, value in usual.items()}


def stored_options(config_json: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options that a model's stored weights stand for; None where bitsandbytes has not quantized them."""
    said = config_json.get("quantization_config")
    return options_of(said) if isinstance(said, Mapping) and said else None


def adapter_quantization(directory: Path) -> dict[str, Any]:
    """The options that quantize the base of a saved adapter as it was; empty where nothing says so."""
    try:
        said = json.loads((directory / QUANTIZATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (options_of(said) or {}) if isinstance(said, dict) else {}


def write_quantization(quantization: Quantization, directory: Path) -> None:
    """Write how the base was quantized beside its adapter."""
    text = json.dumps(quantization.as_json(), indent=2) + "\n"
    (directory / QUANTIZATION_FILE).write_text(text, encoding="utf-8")
