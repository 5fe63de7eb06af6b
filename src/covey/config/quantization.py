"""How bitsandbytes packs the weights of a model: by the options of a run, by an adapter's directory, and by
the config.json of a model that is stored packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.options.schema import Config

QUANTIZATION_FILE = "quantization_config.json"
"""Beside an adapter: how its base was packed, in the words of transformers' BitsAndBytesConfig."""

OF_FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
"""The options that decide packed weights beside their number of bits."""

_BITSANDBYTES = ("bitsandbytes", "bnb")
# Weights that share a constant, and constants that share one of the second level.
_BLOCK, _NESTED_BLOCK = 64, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Weights of 4 or 8 bits; of 8 the number of bits says all. `compute_dtype` auto is that of the run."""

    bits: int
    kind: str = "nf4"
    is_nested: bool = True
    storage: str = "uint8"
    compute_dtype: str = "auto"

    @property
    def bits_per_weight(self) -> float:
        """With the constants of blocks; each row of 8-bit weights has one, which is as good as nothing."""
        if self.bits == 8:
            return 8.0
        return 4 + (8 / _BLOCK + 32 / (_BLOCK * _NESTED_BLOCK) if self.is_nested else 32 / _BLOCK)

    @property
    def in_words(self) -> str:
        """As `4 bits (nf4, double quantization)`."""
        double = ", double quantization" if self.is_nested else ""
        return f"{self.bits} bits" + (f" ({self.kind}{double})" if self.bits == 4 else "")

    def as_json(self) -> dict[str, Any]:
        """Return what BitsAndBytesConfig.from_dict takes."""
        said: dict[str, Any] = {"quant_method": _BITSANDBYTES[0], f"load_in_{self.bits}bit": True}
        if self.bits == 4:
            said |= zip(OF_FOUR_BITS, (self.kind, self.is_nested, self.storage), strict=True)
        return said


def quantization_of(config: Config) -> Quantization | None:
    """How a run packs the weights of its base; None where it does not, or not by bitsandbytes."""
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
    """The options that a quantization_config stands for; None where it is not of bitsandbytes."""
    is_8bit = bool(said.get("load_in_8bit"))
    if said.get("quant_method", _BITSANDBYTES[0]) not in _BITSANDBYTES:
        return None
    if is_8bit or not said.get("load_in_4bit"):
        return {"quant_bits": "8"} if is_8bit else None
    # What transformers takes for words that are missing.
    usual = dict(zip(OF_FOUR_BITS, ("fp4", False, "uint8"), strict=True))
    return {"quant_bits": "4"} | {name: said.get(name, value) for name, value in usual.items()}


def stored_options(config_json: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options that a model's own packed weights stand for, by its config.json; None where it has none of
    bitsandbytes."""
    said = config_json.get("quantization_config")
    return options_of(said) if isinstance(said, Mapping) and said else None


def adapter_quantization(directory: Path) -> dict[str, Any]:
    """The options that stand for how the base of a saved adapter was packed; empty where nothing says so."""
    try:
        said = json.loads((directory / QUANTIZATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (options_of(said) or {}) if isinstance(said, dict) else {}


def write_quantization(quantization: Quantization, directory: Path) -> None:
    """Write it beside an adapter."""
    text = json.dumps(quantization.as_json(), indent=2) + "\n"
    (directory / QUANTIZATION_FILE).write_text(text, encoding="utf-8")
