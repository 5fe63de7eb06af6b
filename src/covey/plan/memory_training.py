"""The memory of training, by part: what stays from the load to the end, and what each phase adds to it.

Weights are held in the dtype that is computed in, with float32 masters beside them where that is lower;
gradients and AdamW's moments are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from covey.config.start import reference_adapter
from covey.options.schema import Config
from covey.plan.activations import (
    FLOAT,
    SENT_TOGETHER,
    PassSize,
    Training,
    head_block,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    weight_bytes,
    working_bytes,
)
from covey.plan.facts import Facts, ModelSizes
from covey.plan.layout import Layout
from covey.plan.levers import REFERENCE, group_share, moment_bytes, optimizer_parts, parts_away
from covey.plan.memory_rollout import planned_layout

LOW = 2
"""Bytes of a number of lower precision."""

_HEAD_BLOCKS = 3
# How often a CPU counts activations: its allocator keeps many of the blocks that were freed.
_ON_CPU = 2
# DeepSpeed's reduce_bucket_size, twice, since the next one fills while one is reduced.
_BUCKET, _BUCKETS = 500_000_000, 2
# What goes with the weights where these are offloaded.
_OFFLOADED = ("weights", "adapters", *REFERENCE)


@dataclass(frozen=True, slots=True)
class Weights:
    """Counts of what is trained: `low` in a lower dtype with masters beside it, `single` in float32 alone."""

    low: int
    single: int

    @property
    def trained(self) -> int:
        """Both together."""
        return self.low + self.single


def weights_of(model: ModelSizes, how: Training) -> Weights:
    """Return the weights that are trained: all, or an adapter's and those saved whole beside it."""
    low, full = (model.parameters, 0) if how.full else (model.saved_parameters, model.adapter_parameters)
    return Weights(0, low + full) if how.element == FLOAT else Weights(low, full)


def held_parts(
    config: Config, model: ModelSizes, how: Training, weights: Weights, layout: Layout
) -> dict[str, int]:
    """What stays from the load to the end, but for the moments."""
    held = {"weights": layout.on_gpu(weight_bytes(model, how), "weights")}
    if not how.full:
        adapters = FLOAT * model.adapter_parameters + how.element * model.saved_parameters
        held["adapters"] = layout.on_gpu(adapters, "weights")
    if weights.low:
        held["masters"] = layout.on_gpu(FLOAT * weights.low, "optimizer")
    if layout.fsdp and how.full and weights.low:
        # FSDP holds the masters alone, and makes a layer of them as it computes.
        del held["weights"]
    # A policy with an adapter is its own reference, unless that has an adapter too: since it follows the
    # policy, or since the run started from one.
    if has_kl(config) and how.full:
        held["reference"] = layout.on_gpu(how.element * model.parameters, "weights")
    if has_kl(config) and (config.sync_ref_model or (not how.full and reference_adapter(config) is not None)):
        held |= _moving(how, weights, layout)
    return held


def has_kl(config: Config) -> bool:
    """Return whether the loss or the rewards compare with a reference."""
    return bool(config.beta or config.beta_end)


def _moving(how: Training, weights: Weights, layout: Layout) -> dict[str, int]:
    """What a reference that follows the policy, or has an adapter of its own, keeps: float32 of all that is
    trained, which in full training in float32 the reference is."""
    if how.full:
        low = FLOAT * weights.low
        return {"reference in float32": layout.on_gpu(low, "weights")} if low else {}
    adapters = FLOAT * weights.trained + how.element * weights.low
    return {"reference adapter": layout.on_gpu(adapters, "weights")}


def load_parts(model: ModelSizes, how: Training, held: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """The fullest moment of the load: the model as it was saved beside its copies, which DeepSpeed makes part
    by part; of the rows that prove the layout the head alone gets a gradient. Of FSDP's shards a whole copy
    is made to prove it."""
    if layout.fsdp:
        whole = {"gathered weights": how.element * model.parameters}
        return dict(held) | gathered_layer(model, how, layout) | whole
    if layout.zero_stage:
        return {name: held[name] for name in ("weights", "masters", "reference") if name in held}
    if how.packed_bits:
        # Each tensor is quantized as soon as it is read; the embedding, which is not, is cast after.
        largest = FLOAT * max(_units(model)[0], model.hidden * model.intermediate)
        return dict(held) | {"tensor in float32": largest, "probe": _of_head(model, how, how.element)}
    start = {"weights in float32": FLOAT * model.parameters, "probe": _of_head(model, how, how.element)}
    if not how.full:
        # The base of an adapter is cast tensor by tensor, in the machine's memory, before it goes to a GPU.
        return dict(held) | {"probe": start["probe"]} if how.cuda else start | {"adapters": held["adapters"]}
    if "reference" in held:
        start["reference in float32"] = FLOAT * model.parameters
    if how.element != FLOAT:
        start["weights"] = how.element * model.parameters
    return start


def gathered_layer(model: ModelSizes, how: Training, layout: Layout) -> dict[str, int]:
    """The layer that stage 3 puts together to compute it, with its gradient: the largest one. FSDP keeps the
    embedding and the head from forward to backward, and puts a layer together while the one before it
    computes."""
    ends, inner = _units(model)
    if layout.fsdp:
        whole = model.parameters - max(0, model.layers - 2) * inner
        return {"gathered layers": how.element * (whole if layout.zero_stage == 3 else model.parameters)}
    if layout.zero_stage < 3:
        return {}
    return {"gathered layer": 2 * how.element * max(ends, inner)}


def _units(model: ModelSizes) -> tuple[int, int]:
    """The weights of the embedding, and of a layer."""
    ends = model.vocabulary * model.hidden
    return ends, (model.parameters - ends * (1 if model.tied else 2)) // model.layers


def bucket_parts(model: ModelSizes, how: Training, weights: Weights, layout: Layout) -> dict[str, int]:
    """What gradients travel between the processes in; FSDP reduces those of a layer at a time, in float32."""
    if layout.fsdp:
        ends, inner = _units(model)
        return {"reduced layer": FLOAT * min(max(ends, inner), weights.trained)}
    if not layout.zero_stage:
        return {"DDP buckets": how.element * weights.low + FLOAT * weights.single}
    return {"reduce buckets": _BUCKETS * how.element * min(_BUCKET, weights.trained)}


def publish_parts(model: ModelSizes, how: Training, layout: Layout) -> dict[str, int]:
    """What brings new weights to the engine: vLLM gets one tensor after the other, and is awake for it; to
    servers some go together, from main memory."""
    if layout.engine == "own":
        return {}
    largest = how.element * model.vocabulary * model.hidden
    parts = {"gathered tensor": largest}
    if layout.engine == "server" and not how.cuda:
        # A copy, and the message that it is put into.
        parts["weights on their way"] = 2 * max(largest, min(SENT_TOGETHER, how.element * model.parameters))
    if layout.engine_sleeps:
        parts["engine"] = LOW * model.parameters // layout.engine_parallel
    return parts


def host_bytes_of(config: Config, facts: Facts, how: Training) -> int:
    """What offloading keeps in the machine's memory, of all processes together."""
    model, layout = facts.model_sizes, planned_layout(facts)
    if model is None:
        return 0
    weights = weights_of(model, how)
    held = held_parts(config, model, how, weights, replace(layout, offload="none", zero_stage=0))
    num_bytes = 0
    if layout.is_offloaded("weights"):
        num_bytes += sum(held.get(name, 0) for name in _OFFLOADED)
    if layout.is_offloaded("gradients"):
        num_bytes += FLOAT * weights.trained
    if layout.is_offloaded("optimizer"):
        num_bytes += moment_bytes(config, weights.trained) + held.get("masters", 0)
    parked = lever_bytes(config, model, how, layout) if how.cuda else 0
    return num_bytes + max(1, facts.num_processes) * parked


def lever_bytes(config: Config, model: ModelSizes, how: Training, layout: Layout) -> int:
    """What a process keeps in the machine's memory for `offload_optimizer` and its kin."""
    weights = weights_of(model, how)
    held = held_parts(config, model, how, weights, layout)
    held["moments"] = layout.on_gpu(moment_bytes(config, weights.trained), "optimizer")
    away = parts_away(config, layout, "rollout")
    return sum(num_bytes for name, num_bytes in held.items() if name in away)


def step_parts(
    config: Config, model: ModelSizes, how: Training, held: Mapping[str, int], layout: Layout
) -> dict[str, int]:
    """What a step holds: the gradients, and of state that is offloaded some layers at a time."""
    weights = weights_of(model, how)
    parts = {"gradients": layout.on_gpu(FLOAT * weights.trained, "gradients")}
    state = sum(held.get(name, 0) for name in optimizer_parts(layout))
    share = group_share(config, model, full=how.full)
    return parts | ({"optimizer state of some layers": round(share * state)} if share else {})


def annotation_parts(model: ModelSizes, size: PassSize, how: Training) -> dict[str, int]:
    """A forward pass of which nothing is kept."""
    block = head_block(model, size.trained, cuda=how.cuda)
    work = max(working_bytes(model, size, how), _HEAD_BLOCKS * block.num_bytes)
    return {"forward pass": mask_bytes(size, how) + work}


def update_parts(
    model: ModelSizes,
    size: PassSize,
    how: Training,
    weights: Weights,
    layout: Layout,
    *,
    adds_up: bool = False,
) -> dict[str, int]:
    """The fullest moment of a backward pass: at its start all activations are held, at its end all
    gradients, of which FSDP `adds_up` whole ones until the last pass has reduced them."""
    held = FLOAT * weights.trained
    before = (held if adds_up else layout.on_gpu(held, "gradients")) if size.later else 0
    of_head = _of_head(model, how, how.element)
    kept = (1 if how.cuda else _ON_CPU) * kept_bytes(model, size, how)
    layer = working_bytes(model, size, how)
    if how.recompute != "none":
        layer += layer_bytes(model, size, how)
    if how.offload:
        layer += mask_bytes(size, how)
    start = {"gradients": before, "activations": kept, "head": of_head + _head(model, size, how)}
    inside = {"gradients": before + of_head, "activations": kept + layer}
    end = {"gradients": max(before, _gradients(how, weights, layout))}
    # Of a tied head the gradient waits for that of the embedding, and both are added to that of a master.
    adding = model.vocabulary * model.hidden * FLOAT if weights.low else 0
    end["head"] = of_head * (2 if before and not weights.low else 1) + adding
    return max((start, inside, end), key=lambda parts: sum(parts.values()))


def _gradients(how: Training, weights: Weights, layout: Layout) -> int:
    """What is held of gradients at the end of a backward pass: float32 sums, and those of lower precision
    that come to them, unless these go at once: in one process, and from stage 2 on when they are reduced."""
    lower = how.element * weights.low if layout.zero_stage < 2 and not how.absorbs else 0
    return layout.on_gpu(FLOAT * weights.trained, "gradients") + lower


def _head(model: ModelSizes, size: PassSize, how: Training) -> int:
    """The head's backward pass: blocks of logits, the gradient of the hidden states, and of its own a block
    as it comes and as a sum."""
    block = head_block(model, size.trained, cuda=how.cuda)
    low = how.element if how.element != FLOAT else 0
    num_bytes = _HEAD_BLOCKS * block.num_bytes + size.trained * model.hidden * (FLOAT + low)
    if _trains_head(model, how):
        num_bytes += block.words * model.hidden * (FLOAT + how.element)
    return num_bytes


def _trains_head(model: ModelSizes, how: Training) -> bool:
    return how.full or (bool(model.saved_parameters) and not model.tied)


def _of_head(model: ModelSizes, how: Training, element: int) -> int:
    """The gradient of the head."""
    return model.vocabulary * model.hidden * element if _trains_head(model, how) else 0
