"""What offloading and 8-bit moments change in the memory of a run."""

from __future__ import annotations

import math
from typing import Any

from covey.options.schema import Config
from covey.plan.activations import FLOAT, outer_parameters
from covey.plan.facts import ModelSizes
from covey.plan.layout import Layout

OFFLOADS = ("offload_optimizer", "offload_model", "offload_reference")
"""The options that move tensors to CPU memory."""

MOMENTS = 2 * FLOAT
"""Bytes of AdamW's moments, for each trained weight."""

# Of 8 bits each, with a float32 scale for every 256 of either.
_MOMENTS_8BIT = 2 + 2 * FLOAT / 256

REFERENCE = ("reference", "reference in float32", "reference adapter")
"""The parts of a reference, as the forecast names them."""


def moment_bytes(config: Config, num_weights: int) -> int:
    """Return what AdamW's moments take of so many trained weights."""
    each = _MOMENTS_8BIT if config.optim == "adamw_8bit" else MOMENTS
    return math.ceil(each * num_weights)


def optimizer_parts(layout: Layout) -> tuple[str, ...]:
    """The parts that only a step needs; FSDP also computes with its masters."""
    return ("moments",) if layout.fsdp else ("moments", "masters")


def parts_away(config: Config, layout: Layout, phase: str) -> frozenset[str]:
    """Return the parts that are in CPU memory during a phase."""
    away: set[str] = set()
    if config.offload_optimizer:
        away.update(optimizer_parts(layout))
    if config.offload_reference and phase != "annotate":
        away.update(REFERENCE)
    if config.offload_model and phase == "rollout":
        away.update(optimizer_parts(layout), REFERENCE)
        if layout.fsdp or layout.engine != "own":
            # The engine has weights of its own.
            away.update(("weights", "masters", "adapters"))
    return frozenset(away)


def lever_edits(config: Config, layout: Layout) -> list[dict[str, Any]]:
    """Return the options that would still offload state or hold it in 8 bits, the least costly first; nothing
    where DeepSpeed holds it."""
    if layout.by_deepspeed:
        return []
    found: dict[str, Any] = {}
    if layout.offload != "params":
        found |= dict.fromkeys(("offload_reference", "offload_model", "offload_optimizer"), True)
    if not layout.fsdp:
        found["optim"] = "adamw_8bit"
    return [{name: value} for name, value in found.items() if getattr(config, name) != value]


def group_share(config: Config, model: ModelSizes, *, full: bool) -> float:
    """Return the largest share of the trained weights that is stepped at a time: the embedding, or a group of
    layers."""
    if not config.offload_optimizer:
        return 0.0
    groups = min(config.move_model_batches or model.layers, model.layers)
    of_layers = math.ceil(model.layers / groups) / model.layers
    if not full:
        return of_layers
    trained = model.parameters - model.frozen_parameters
    if model.frozen_text:
        return of_layers
    layers = trained - outer_parameters(model)
    return max(model.vocabulary * model.hidden, of_layers * layers) / max(1, trained)
