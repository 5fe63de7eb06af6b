"""The memory of what a split model puts together for a time, and of what gradients travel in.

A unit is a decoder layer, or what is outside of them: the embedding, the last norm and the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from covey.options.schema import Config
from covey.plan.activations import FLOAT, Training, outer_parameters
from covey.plan.deepspeed import ZERO, engine_settings
from covey.plan.facts import Facts, ModelSizes
from covey.plan.layout import Layout
from covey.plan.memory_vllm import weight_bytes

LOW = 2
"""Bytes of a number of lower precision."""

# What DeepSpeed takes where nothing is written, in elements.
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
# DDP's buckets of weights, as they are sent and as they arrive.
_SENT_BY_DDP = 2 * 250 * 2**20
# Copies of what is gathered that are there at a time: as it arrives and as it computes, and gloo's own.
_COPIES, _COPIES_OF_GLOO = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """How a layout of a model gathers: `ends` and `inner` are the weights outside of the layers and of one
    layer, `tensor` those of the largest tensor; `bucket` and `live` are DeepSpeed's reduce_bucket_size, times
    two where it reduces one while the next fills, and stage3_max_live_parameters, all in elements."""

    layout: Layout
    parameters: int
    ends: int
    inner: int
    tensor: int
    bucket: int
    live: int
    element: int
    copies: int
    is_joined: bool

    @property
    def is_split(self) -> bool:
        """Whether a process holds a part of each weight alone."""
        return self.layout.fsdp or self.layout.zero_stage == 3

    @property
    def some(self) -> int:
        """The weights outside of the layers, and those of two layers."""
        return min(self.parameters, self.ends + 2 * self.inner)

    @property
    def largest(self) -> int:
        """The most weights that are gathered in one go: FSDP gathers units, DeepSpeed tensors or layers."""
        return max(self.ends if self.layout.fsdp else self.tensor, self.inner)


def gathering_of(config: Config, facts: Facts, model: ModelSizes, how: Training, layout: Layout) -> Gathering:
    """Return what is gathered under a layout."""
    tensor = model.vocabulary * model.hidden
    inner = (model.parameters - model.seeing_parameters - outer_parameters(model)) // model.layers
    zero = engine_settings(config, facts)[ZERO] if layout.by_deepspeed else {}
    return Gathering(
        layout=layout,
        parameters=model.parameters,
        ends=model.parameters - model.layers * inner,
        inner=inner,
        tensor=tensor,
        bucket=zero.get("reduce_bucket_size", _BUCKET) * (2 if zero.get("overlap_comm") else 1),
        live=zero.get("stage3_max_live_parameters", _LIVE),
        element=how.element,
        copies=_COPIES if how.cuda else _COPIES_OF_GLOO,
        is_joined=model.is_joined,
    )


def computing_parts(gathering: Gathering, how: Training) -> dict[str, int]:
    """What is whole while the model computes. FSDP keeps the embedding and the head from forward to backward,
    and puts a layer together while the one before it computes; in stage 2 it keeps all. DeepSpeed's stage 3
    keeps as much as it may, and has the gradient of a layer beside it. The activations of a linear layer that
    are kept for the backward pass hold its weights too, so without recomputation all of them stay."""
    g = gathering
    if g.layout.fsdp:
        return {"gathered layers": g.element * (g.some if g.layout.zero_stage == 3 else g.parameters)}
    if not g.is_split:
        return {}
    live = g.parameters if how.recompute != "full" else min(g.parameters, max(g.live, g.some))
    return {"gathered layers": g.element * (live + max(g.tensor, g.inner))}


def bucket_parts(gathering: Gathering, how: Training, trained: int) -> dict[str, int]:
    """Return the bytes of the buffers that reduce gradients between processes, by part. FSDP reduces one unit
    at a time, in float32. DeepSpeed allocates its bucket whole, and keeps gradients in it until it is full.
    """
    g = gathering
    if g.layout.fsdp:
        return {"reduced layer": FLOAT * min(max(g.tensor, g.inner), trained)}
    if not g.layout.zero_stage:
        return {}
    in_bucket = min(g.bucket, trained) if g.layout.zero_stage == 2 else 0
    return {"reduce buckets": how.element * (g.bucket + in_bucket)}


def publish_parts(gathering: Gathering, model: ModelSizes, how: Training) -> dict[str, int]:
    """What brings new weights to the engine, one tensor after the other: vLLM is awake for it."""
    g, layout = gathering, gathering.layout
    if layout.engine == "own":
        return {}
    numbers = g.copies * g.largest if g.is_split else g.tensor
    if layout.fsdp and layout.zero_stage == 2:
        numbers += g.parameters
    parts = {"gathered tensor": g.element * numbers}
    if layout.engine_sleeps:
        parts["engine"] = weight_bytes(model, how, layout)
    return parts


def loading_parts(
    gathering: Gathering, how: Training, held: Mapping[str, int], trained: int, float32_bytes: int
) -> dict[str, int]:
    """The fullest moment of the load. A split model proves the layout of its rows on some layers; files that
    transformers joins are read whole in each process, on a CPU into the memory of the run. DeepSpeed's
    stages 1 and 2 read the model in float32, and copy what they train into one block. On a CPU the base of an
    adapter is read in float32, `float32_bytes`."""
    g = gathering
    if g.is_split:
        joined = {"copy while loading": float32_bytes} if g.is_joined and not how.cuda else {}
        # Two layers beside the embedding and the head, and under DeepSpeed one of them as it arrives.
        probed = {"gathered layers": g.element * (g.some + (0 if g.layout.fsdp else g.largest))}
        return dict(held) | max(probed, joined, key=lambda parts: sum(parts.values()))
    if g.layout.zero_stage:
        copied = {"copy while loading": g.element * trained}
        if how.full and how.element == LOW:
            copied["copy while loading"] += float32_bytes
        without = {name: num_bytes for name, num_bytes in held.items() if name != "masters"}
        return max((dict(held), without | copied), key=lambda parts: sum(parts.values()))
    if g.layout.num_gpus > 1 and not how.packed_bits:
        # DDP sends the first rank's weights to the others.
        held = {**held, "copy while loading": min(g.element * g.parameters, _SENT_BY_DDP)}
        held.pop("DDP buckets", None)
    if how.full or how.cuda or how.packed_bits:
        return dict(held)
    return dict(held) | {"weights": float32_bytes}
