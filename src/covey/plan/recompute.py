"""Whether activations are kept for the backward pass or computed again, from the bytes that they take."""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]
"""Which activations are computed again: none; all but matrix products and attention; all of a layer."""

# What is kept of a layer's activations, as a share of all of them. Layers of the Llama family were measured
# at 0.42 to 0.59, those with wide MLPs or norms on queries and keys lowest, float32 above bfloat16
# (tests/unit/models/test_activations.py); computing whole layers again keeps 0.05 to 0.08.
SELECTIVE_SHARE = 0.6


def choose_recompute(
    asked: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
) -> Recompute:
    """Say what an option `gradient_checkpointing` means.

    `needed_bytes` are the activations of the largest forward pass with none computed again, `free_bytes` what
    weights, gradients, optimizer and logits leave for them. `auto` gives up as little speed as fits; where
    either number is not known it is "none".
    """
    if asked != "auto":
        return {"true": "full", "false": "none", "selective": "selective"}[asked]  # type: ignore[return-value]
    if needed_bytes is None or free_bytes is None or needed_bytes <= free_bytes:
        return "none"
    return "selective" if SELECTIVE_SHARE * needed_bytes <= free_bytes else "full"
