"""Offloading and 8-bit moments: where they cannot work, and where they have nothing to act on."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from covey.config.start import reference_adapter
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.layout import Layout
from covey.plan.levers import OFFLOADS, by_deepspeed
from covey.plan.memory_training import has_kl
from covey.plan.problem import problem, warning
from covey.types import Fix, Problem

_MERGED = "Two commands were merged."


def lever_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what the facts say against offloading and 8-bit moments."""
    asked = [name for name in OFFLOADS if getattr(config, name)]
    found = [*_eight_bit(config, facts.layout), *_groups(config, typed)]
    for name in asked:
        found += _with_deepspeed(name, config, facts.layout) or _without_effect(name, config, facts)
    return found


def _eight_bit(config: Config, layout: Layout) -> list[Problem]:
    is_deepspeed = by_deepspeed(config, layout)
    if config.optim != "adamw_8bit" or not (layout.fsdp or is_deepspeed):
        return []
    plain = Fix(text="moments of 32 bits, which are split over the processes", edits={"optim": "adamw_torch"})
    if not is_deepspeed:
        seen = "optim is adamw_8bit, and fsdp splits the model."
        cause = "8-bit moments have a scale for each block of 256 weights, and shards cut such blocks."
        whole = Fix(text="a whole model in each process", edits={"fsdp": None})
        return [problem("E115", "optim", seen, cause, plain, whole)]
    seen = "optim is adamw_8bit, and DeepSpeed owns the optimizer."
    return [problem("E115", "optim", seen, _MERGED, plain)]


def _with_deepspeed(name: str, config: Config, layout: Layout) -> list[Problem]:
    """Beside DeepSpeed, whose own offloading does it or does not."""
    if not by_deepspeed(config, layout):
        return []
    off = Fix(text="leave it to DeepSpeed", edits={name: False})
    needed = "optimizer" if name == "offload_optimizer" else "params"
    if layout.offload in (needed, "params"):
        seen = f"{name} is on, and DeepSpeed offloads that already."
        return [warning("W108", name, seen, _MERGED, off)]
    seen = f"{name} is on, and DeepSpeed holds weights and optimizer state."
    preset = "zero2_offload" if needed == "optimizer" and layout.zero_stage < 3 else "zero3_offload"
    own = Fix(text="DeepSpeed's own offloading", edits={name: False, "deepspeed": preset})
    return [problem("E115", name, seen, _MERGED, own, off)]


def _without_effect(name: str, config: Config, facts: Facts) -> Iterator[Problem]:
    layout = facts.layout
    off = Fix(text="leave it out", edits={name: False})
    own_reference = has_kl(config) and (
        config.tuner_type != "lora" or config.sync_ref_model or reference_adapter(config) is not None
    )
    if name == "offload_reference" and not own_reference:
        why = (
            "the reference is the policy with its adapter off"
            if has_kl(config)
            else "beta is 0, so there is no reference"
        )
        yield warning("W108", name, f"{name} is on, and {why}.", "A command for another run.", off)
    elif facts.cuda is False and layout.is_here:
        seen = f"{name} is on, and this run computes in CPU memory: it takes as much with it as without."
        yield warning("W108", name, seen, "A command written for a GPU.", off)
    elif layout.fsdp and layout.offload == "params":
        seen = f"{name} is on, and fsdp_offload keeps shards and optimizer state in CPU memory already."
        if name != "offload_reference":
            yield warning("W108", name, seen, _MERGED, off)


def _groups(config: Config, typed: Collection[str]) -> list[Problem]:
    if "move_model_batches" not in typed or config.move_model_batches is None or config.offload_optimizer:
        return []
    seen = f"move_model_batches is {config.move_model_batches}, and offload_optimizer is off."
    cause = "In ms-swift it is for vLLM; the native engine samples with the trained weights themselves."
    return [
        warning(
            "W108",
            "move_model_batches",
            seen,
            cause,
            Fix(text="leave it out", edits={"move_model_batches": None}),
            Fix(text="offload the optimizer's state", edits={"offload_optimizer": True}),
        )
    ]
