"""Offloading and 8-bit moments: where they cannot work, and where they have nothing to act on."""

from __future__ import annotations

from collections.abc import Collection

from covey.checks.check import Check
from covey.config.start import reference_adapter
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.layout import Layout
from covey.plan.levers import OFFLOADS
from covey.plan.memory_training import has_kl
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem


def lever_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what the facts say against offloading and 8-bit moments."""
    found = [*_eight_bit(config, facts.layout), *_groups(config, typed)]
    check = _with_deepspeed if facts.layout.by_deepspeed else _without_effect
    for name in OFFLOADS:
        if getattr(config, name):
            found += check(name, config, facts)
    return found


def _eight_bit(config: Config, layout: Layout) -> list[Problem]:
    if config.optim != "adamw_8bit":
        return []
    plain = Fix(text=tr("use 32-bit moments, which can be sharded"), edits={"optim": "adamw_torch"})
    if layout.by_deepspeed:
        seen = tr("optim is adamw_8bit, but DeepSpeed holds the optimizer state.")
        return [problem("E115", "optim", seen, "", plain)]
    if layout.fsdp:
        seen = tr("optim is adamw_8bit, but fsdp shards the model.")
        cause = tr(
            "8-bit moments share one scale per block of 256 weights, and sharding would split these blocks."
        )
        whole = Fix(text=tr("keep the whole model in each process"), edits={"fsdp": None})
        return [problem("E115", "optim", seen, cause, plain, whole)]
    return []


def _with_deepspeed(name: str, config: Config, facts: Facts) -> list[Problem]:
    """Beside DeepSpeed, which has its own offloading."""
    layout = facts.layout
    off = Fix(text=tr("leave it out"), edits={name: False})
    needed = "optimizer" if name == "offload_optimizer" else "params"
    if layout.offload in (needed, "params"):
        seen = tr("{name} is on, but DeepSpeed already offloads the same state.", name=name)
        return [warning("W108", name, seen, "", off)]
    seen = tr("{name} is on, but DeepSpeed holds weights and optimizer state.", name=name)
    preset = "zero2_offload" if needed == "optimizer" and layout.zero_stage < 3 else "zero3_offload"
    own = Fix(text=tr("offload with DeepSpeed"), edits={name: False, "deepspeed": preset})
    return [problem("E115", name, seen, "", own, off)]


def _without_effect(name: str, config: Config, facts: Facts) -> list[Problem]:
    layout, is_reference = facts.layout, name == "offload_reference"
    has_weights = (
        config.tuner_type != "lora" or config.sync_ref_model or reference_adapter(config) is not None
    )
    if is_reference and not has_kl(config):
        why = tr("beta is 0, so there is no reference")
    elif is_reference and not has_weights:
        why = tr("the reference is the policy with its adapter off")
    elif facts.machine.cuda is False and layout.is_here:
        why = tr("this run is on a CPU, where offloading frees no memory")
    elif layout.fsdp and layout.offload == "params" and not is_reference:
        why = tr("fsdp_offload keeps shards and optimizer state in CPU memory already")
    else:
        return []
    off = Fix(text=tr("leave it out"), edits={name: False})
    return [warning("W108", name, tr("{name} is on, but {why}.", name=name, why=why), "", off)]


def _groups(config: Config, typed: Collection[str]) -> list[Problem]:
    if "move_model_batches" not in typed or config.move_model_batches is None or config.offload_optimizer:
        return []
    seen = tr(
        "move_model_batches is {move_model_batches}, but offload_optimizer is off.",
        move_model_batches=config.move_model_batches,
    )
    cause = tr(
        "In ms-swift the option is about moving weights to vLLM. In covey it splits the optimizer step "
        "of offload_optimizer."
    )
    return [
        warning(
            "W108",
            "move_model_batches",
            seen,
            cause,
            Fix(text=tr("leave it out"), edits={"move_model_batches": None}),
            Fix(text=tr("offload the optimizer state"), edits={"offload_optimizer": True}),
        )
    ]


CHECK = Check(place=60, judge=lambda config, facts, typed: lever_problems(config, facts, typed or ()))
