"""The parts of the memory as people read them; their names are keys of `Phase.parts`."""

from __future__ import annotations

from collections.abc import Mapping

from covey.texts import tr

_WORDS: Mapping[str, str] = {
    "weights": tr("weights"),
    "weights in float32": tr("weights in float32"),
    "weights side by side": tr("weights side by side"),
    "weights on their way": tr("weights on their way"),
    "merged weights": tr("merged weights"),
    "gathered layer": tr("gathered layer"),
    "gathered layers": tr("gathered layers"),
    "gathered tensor": tr("gathered tensor"),
    "tensor in float32": tr("tensor in float32"),
    "adapters": tr("adapters"),
    "masters": tr("masters"),
    "moments": tr("moments"),
    "gradients": tr("gradients"),
    "activations": tr("activations"),
    "forward pass": tr("forward pass"),
    "head": tr("head"),
    "reference": tr("reference"),
    "reduced layer": tr("reduced layer"),
    "reduce buckets": tr("reduce buckets"),
    "DDP buckets": tr("DDP buckets"),
    "KV cache": tr("KV cache"),
    "KV cache of one row": tr("KV cache of one row"),
    "sampling": tr("sampling"),
    "recordings": tr("recordings"),
    "engine": tr("engine"),
    "communication": tr("communication"),
    "copies in CPU memory": tr("copies in CPU memory"),
    "reward models": tr("reward models"),
}


def part_words(name: str) -> str:
    """Return the name of a part as a text; one that has no other words stays as it is."""
    return _WORDS.get(name, name)
