"""The functions of the library that decode, and the structures that they are given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from covey.kernels.cpu.library import FLOAT, INT, POINTER, structure

Weight = structure("Weight", **dict.fromkeys(("weight", "bias", "panels"), POINTER))
PanelCopy = structure("PanelCopy", weight=POINTER, panels=POINTER, columns=INT, inner=INT)
PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")
NORMS = ("before_attention", "before_mlp", "query_norm", "key_norm")
Layer = structure(
    "Layer", **dict.fromkeys(PRODUCTS, Weight), **dict.fromkeys((*NORMS, "prefix", "own"), POINTER)
)
Model = structure(
    "Model",
    **dict.fromkeys(("layers", "width", "heads", "key_heads", "head_width", "inner"), INT),
    **dict.fromkeys(("epsilon", "scaling"), FLOAT),
    **dict.fromkeys(("embedding", "norm", "cosines", "sines", "layer"), POINTER),
    **dict.fromkeys(("prefix_slots", "prefix_columns", "own_slots", "own_columns"), INT),
)
SPANS = ("slot", "slot_first", "slot_count", "row", "row_first", "row_count")
_BUFFERS = ("hidden", "heads", "attended", "gate", "up", "normed", "scores")
# The three that decoding moves on come first.
_GIVEN = ("token", "position", "row_count", *(name for name in SPANS if name != "row_count"))
TokenCall = structure(
    "TokenCall",
    number=INT,
    **dict.fromkeys((*_GIVEN, *_BUFFERS), POINTER),
    **dict.fromkeys(("scores_width", "threads"), INT),
)
DrawCall = structure(
    "DrawCall",
    **dict.fromkeys(("number", "states", "width", "vocab", "stops", "threads"), INT),
    **dict.fromkeys(("head", "hidden", "temperature", "key", "table", "shared", "lead", "stop"), POINTER),
    **dict.fromkeys(("position", "token", "logits", "logprob"), POINTER),
)


@dataclass(frozen=True, slots=True)
class Functions:
    """The library's functions for one precision."""

    step: Any
    draw: Any
    decode: Any
    copy_rows: Any
    multiply_rows: Any
    lay_panels: Any

    @classmethod
    def of(cls, library: ctypes.CDLL, dtype: torch.dtype) -> Functions:
        suffix = str(dtype).removeprefix("torch.")
        names = ("step", "draw", "decode", "copy_rows", "multiply_rows", "lay_panels")
        found = cls(*(getattr(library, f"{name}_{suffix}") for name in names))
        found.decode.restype = INT
        return found
