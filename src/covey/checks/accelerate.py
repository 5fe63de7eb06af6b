"""Checks of what `accelerate launch` asks for; a process learns that only from environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem


def accelerate_problems(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each thing that accelerate was asked for and the run would not do; `typed` holds
    the options that were given."""
    return [*_sharding(environment, typed), *_one_process(environment, typed)]


def _sharding(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    if {"fsdp", "deepspeed"} & typed.keys():
        return []
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        devices = ("OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE")
        is_offloaded = any(environment.get(f"ACCELERATE_DEEPSPEED_{d}", "none") != "none" for d in devices)
        named = f"zero{stage}{'_offload' if is_offloaded and stage in ('2', '3') else ''}"
        named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or named
        asks, edits = "ACCELERATE_USE_DEEPSPEED", {"deepspeed": named}
    elif environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        asks, edits = "ACCELERATE_USE_FSDP", {"fsdp": "full_shard"}
    else:
        return []
    seen = tr(
        "The environment variable {asks} is true, but the command has neither --deepspeed nor --fsdp.",
        asks=asks,
    )
    return [
        problem(
            "E379",
            "fsdp",
            seen,
            tr("The variable comes from a configuration file of accelerate."),
            Fix(text=tr("shard the model as that file says"), edits=edits),
            Fix(text=tr("keep the whole model in each process"), edits={"fsdp": "off"}),
        )
    ]


def _one_process(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    """W192: asked for several processes without `--multi_gpu`, accelerate sets the address at which they
    meet, but starts only one."""
    is_of_accelerate = environment.get("ACCELERATE_MIXED_PRECISION") and environment.get("MASTER_ADDR")
    is_one_of_several = any(environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES"))
    if not is_of_accelerate or is_one_of_several or "nproc_per_node" in typed:
        return []
    seen = tr(
        "MASTER_ADDR is set, as `accelerate launch` sets it for several processes, but RANK and WORLD_SIZE "
        "are not set: accelerate has started only this process."
    )
    own = Fix(text=tr("let covey start N processes: covey train ... --nproc_per_node N"))
    gpus = Fix(text=tr("on GPUs: accelerate launch --multi_gpu --num_processes N -m covey train ..."))
    return [warning("W192", "nproc_per_node", seen, "", own, gpus)]
