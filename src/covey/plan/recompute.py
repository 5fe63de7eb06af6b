"""Whether activations are kept for the backward pass or computed again, from the bytes they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from covey.texts import tr

Recompute = Literal["none", "selective", "full"]
"""Which activations are computed again: none; all but matrix products and attention; all of a layer."""

KINDS: tuple[Recompute, ...] = ("none", "selective", "full")
"""Fastest first."""

IN_WORDS: Mapping[Recompute, str] = {
    "none": tr("activations are kept"),
    "selective": tr("activations are recomputed, except matrix products and attention"),
    "full": tr("activations are recomputed, layer by layer"),
}

TYPED: Mapping[Recompute, str] = {"none": "false", "selective": "selective", "full": "true"}
"""How each is typed as `gradient_checkpointing`."""

_ASKED: Mapping[str, Recompute] = {word: kind for kind, word in TYPED.items()}


def choose_recompute(
    asked: str, needed_bytes: Mapping[Recompute, int] | None, free_bytes: int | None
) -> Recompute:
    """Say what an option `gradient_checkpointing` means.

    `needed_bytes` is what training takes by kind, `free_bytes` what it may take. `auto` gives up as little
    speed as fits; where nothing fits it takes the least, and where either is not known it is "none".
    """
    if asked != "auto":
        return _ASKED[asked]
    if needed_bytes is None or free_bytes is None:
        return "none"
    fitting = (kind for kind in KINDS if needed_bytes[kind] <= free_bytes)
    return next(fitting, min(KINDS, key=lambda kind: needed_bytes[kind]))
