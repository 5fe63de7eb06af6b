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
    PassSize,
    Training,
    head_bytes,
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
    """Return the weights that are trained: all that are not frozen, or an adapter's and those saved whole
    beside it."""
    low, full = model.saved_parameters, model.adapter_parameters
    if how.full:
        low, full = model.parameters - model.frozen_parameters, 0
    return Weights(0, low + full) if how.element == FLOAT else Weights(low, full)


def gradient_bytes(weights: Weights, layout: Layout) -> int:
    """Return the bytes of the gradients that a process sums between two steps, in float32."""
    return layout.on_gpu(FLOAT * weights.trained, "gradients")


def held_parts(
    config: Config, model: ModelSizes, how: Training, weights: Weights, layout: Layout
) -> dict[str, int]:
    """Return what stays to the end, by part, from the load on; the moments from the first step on."""
    held = {"weights": layout.on_gpu(weight_bytes(model, how), "weights")}
    held["moments"] = layout.on_gpu(moment_bytes(config, weights.trained), "optimizer")
    trained = FLOAT * weights.trained
    if not how.full:
        adapters = FLOAT * model.adapter_parameters + how.element * model.saved_parameters
        held["adapters"] = layout.on_gpu(adapters, "weights")
    if weights.low or layout.by_deepspeed:
        # DeepSpeed has masters of what computes in float32, too.
        held["masters"] = layout.on_gpu(trained if layout.by_deepspeed else FLOAT * weights.low, "optimizer")
    if layout.by_deepspeed and layout.zero_stage == 3:
        # It keeps the memory of the gradients from one step to the next.
        held["gradients"] = gradient_bytes(weights, layout)
    if layout.num_gpus > 1 and not layout.zero_stage:
        held["DDP buckets"] = how.element * weights.low + FLOAT * weights.single
    if layout.fsdp and how.full and weights.low:
        # FSDP holds of what is trained the masters alone, and makes a layer of them as it computes.
        held["weights"] = layout.on_gpu(how.element * model.frozen_parameters, "weights")
        if not model.frozen_parameters:
            del held["weights"]
    # A policy with an adapter is its own reference, unless that has an adapter too: since it follows the
    # policy, or since the run started from one.
    if has_kl(config) and how.full:
        held["reference"] = layout.on_gpu(how.element * model.parameters, "weights")
    if has_kl(config) and (config.sync_ref_model or (not how.full and reference_adapter(config) is not None)):
        held |= _moving(how, weights, layout)
    return held


def copies_of_deepspeed(model: ModelSizes, how: Training, weights: Weights, layout: Layout) -> dict[str, int]:
    """Return the bytes that DeepSpeed holds from the load on for an offloaded optimizer, by part: gradients,
    their sums, and in stage 2 two buffers of the largest tensor. Empty if it offloads nothing."""
    if not layout.by_deepspeed or layout.offload == "none":
        return {}
    gradients = gradient_bytes(weights, replace(layout, offload="none"))
    moving = 2 * how.element * model.vocabulary * model.hidden if layout.zero_stage == 2 and how.full else 0
    return {"gradients": gradients, "copies in CPU memory": gradients + moving}


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


def host_bytes_of(config: Config, facts: Facts, how: Training) -> int:
    """What offloading keeps in the machine's memory, of all processes together."""
    model, layout = facts.model.sizes, planned_layout(facts)
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
        num_bytes += held["moments"] + held.get("masters", 0)
    parked = lever_bytes(config, model, how, layout) if how.cuda else 0
    return num_bytes + max(1, facts.launch.num_processes) * parked


def joining_bytes(facts: Facts) -> int:
    """What the processes of a machine with GPUs take of its memory while they load a split model whose files
    transformers joins: float32 of the whole model in each."""
    model, layout = facts.model.sizes, planned_layout(facts)
    is_split = layout.fsdp or layout.zero_stage == 3
    if model is None or not model.is_joined or not is_split or not facts.machine.cuda:
        return 0
    here = facts.launch.num_processes_here if layout.is_here else layout.machine_gpus
    return FLOAT * model.parameters * (here or layout.num_gpus)


def lever_bytes(config: Config, model: ModelSizes, how: Training, layout: Layout) -> int:
    """What a process keeps in the machine's memory for `offload_optimizer` and its kin."""
    weights = weights_of(model, how)
    held = held_parts(config, model, how, weights, layout)
    away = parts_away(config, layout, "rollout")
    return sum(num_bytes for name, num_bytes in held.items() if name in away)


def step_parts(
    config: Config, model: ModelSizes, how: Training, held: Mapping[str, int], layout: Layout
) -> dict[str, int]:
    """What a step holds: the gradients, and of state that is offloaded some layers at a time."""
    weights = weights_of(model, how)
    parts = {"gradients": gradient_bytes(weights, layout)}
    state = sum(held.get(name, 0) for name in optimizer_parts(layout))
    share = group_share(config, model, full=how.full)
    return parts | ({"optimizer state of some layers": round(share * state)} if share else {})


def annotation_parts(model: ModelSizes, size: PassSize, how: Training) -> dict[str, int]:
    """A forward pass of which nothing is kept."""
    work = max(working_bytes(model, size, how), head_bytes(model, size, how))
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
    """The fuller end of a backward pass: at its start all activations are held, at its end all gradients, of
    which FSDP `adds_up` whole ones until the last pass has reduced them."""
    before = (FLOAT * weights.trained if adds_up else gradient_bytes(weights, layout)) if size.later else 0
    layer = working_bytes(model, size, how)
    if how.recompute != "none":
        layer += layer_bytes(model, size, how)
    if how.offload:
        layer += mask_bytes(size, how)
    start = {
        "gradients": before,
        "activations": kept_bytes(model, size, how) + max(layer, head_bytes(model, size, how)),
        "gradient of the head": _of_head(model, how),
    }
    end = {"gradients": max(before, _gradients(how, weights, layout))}
    return max((start, end), key=lambda parts: sum(parts.values()))


def _gradients(how: Training, weights: Weights, layout: Layout) -> int:
    """What is held of gradients at the end of a backward pass: float32 sums, and those of lower precision
    that come to them, unless these go at once: in one process, and from stage 2 on when they are reduced."""
    lower = how.element * weights.low if layout.zero_stage < 2 and not how.absorbs else 0
    return gradient_bytes(weights, layout) + lower


def _of_head(model: ModelSizes, how: Training) -> int:
    """The gradient of the head, where it is trained."""
    is_trained = how.trains_text or (bool(model.saved_parameters) and not model.tied)
    return model.vocabulary * model.hidden * how.element if is_trained else 0
