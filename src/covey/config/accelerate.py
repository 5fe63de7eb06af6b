"""Turns what `accelerate launch` asks of a process into options of covey.

A process that accelerate starts knows the configuration file only by environment variables (utils/launch.py
of accelerate 1.15). What they say of sharding becomes `deepspeed` or `fsdp`; either of these, typed, takes
the place of all that they say of it. What covey does not do is refused, so that no process holds the whole
model where it was to be sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from covey.codes import CODES
from covey.config.take import Layer, Typed
from covey.config.values import FALSE_WORDS
from covey.texts import joined, tr
from covey.types import Fix, Problem, Severity

_STAGE, _FILE = "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_DEVICES = {
    "offload_optimizer": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
}
_NUMBERS = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm",
}
# What accelerate reads as off.
_OFF = frozenset({"", "none", "n", "f", *FALSE_WORDS})
# Other ways to split a model: variables, the value that asks for nothing, and what the others ask for.
_SPLITS: Mapping[str, tuple[str, str]] = {
    "ACCELERATE_USE_MEGATRON_LM": ("", "Megatron-LM"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": ("data_parallel", tr("SageMaker's model parallelism")),
    "PARALLELISM_CONFIG_TP_SIZE": ("1", tr("tensor parallelism")),
    "PARALLELISM_CONFIG_CP_SIZE": ("1", tr("context parallelism")),
    "PARALLELISM_CONFIG_SP_SIZE": ("1", tr("sequence parallelism")),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("1", tr("several copies of a sharded model")),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("", tr("offloaded activations beside FSDP")),
    "FSDP_IGNORED_MODULES": ("", tr("modules that FSDP leaves whole")),
}
_OF_TPU = ("ACCELERATE_IN_TPU_POD", "XLA_USE_BF16", "XLA_DOWNCAST_BF16")


def take_accelerate(layer: Layer, environment: Mapping[str, str], typed: Mapping[str, Typed]) -> None:
    """Add the options that accelerate's variables stand for and nobody has typed, a note that names them,
    and a problem for each thing that covey does not do.

    An option that was typed as null is not typed: every configuration of TRL has `deepspeed` and `fsdp` so.
    """
    given = {name for name, option in typed.items() if option.value not in (None, "")}
    asked = [
        (o, number, name) for name, o in _NUMBERS.items() if (number := _asked(environment, name, "auto"))
    ]
    if not given & {"deepspeed", "fsdp"}:
        layer.problems += _splits(environment)
        asked += _sharding(environment)
    taken = []
    for option, value, variable in asked:
        if option not in given:
            layer.take(option, value, tr("environment of accelerate launch: {name}", name=variable))
            taken.append(f"{option} {value} ({variable})")
    layer.problems += [_note(taken)] if taken else []
    is_dtype_typed = "torch_dtype" in given and typed["torch_dtype"].value != "auto"
    layer.problems += [
        *([] if is_dtype_typed else _precision(environment)),
        *_compiler_and_tpus(environment),
        *([] if "nproc_per_node" in given else _one_process(environment)),
    ]


def _asked(environment: Mapping[str, str], name: str, nothing: str = "") -> str:
    """The value of a variable; an empty one where it asks for nothing."""
    value = environment.get(name, "")
    return "" if value.lower() in (*_OFF, nothing) else value


def _sharding(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Each option of the sharding that is asked for, its value, and the variable that says so."""
    if _asked(environment, "ACCELERATE_USE_DEEPSPEED"):
        yield _deepspeed(environment)
    elif _asked(environment, "ACCELERATE_USE_FSDP"):
        yield _fsdp(environment)
        if _asked(environment, "FSDP_OFFLOAD_PARAMS"):
            yield "fsdp_offload", "true", "FSDP_OFFLOAD_PARAMS"
        if _asked(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
            yield "gradient_checkpointing", "true", "FSDP_ACTIVATION_CHECKPOINTING"


def _deepspeed(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """The file that is named; else a name of covey for stage and offloading, or JSON where there is none."""
    if file := _asked(environment, _FILE):
        return "deepspeed", file, _FILE
    stage = environment.get(_STAGE) or "2"
    devices = {name: _asked(environment, variable) for name, variable in _DEVICES.items()}
    blocks = {name: {"device": device.lower()} for name, device in devices.items() if device}
    value = f"zero{stage}"
    if (stage, *blocks) in (("2", "offload_optimizer"), ("3", *_DEVICES)):
        value += "_offload"
    elif blocks and stage.isdigit():
        value = json.dumps({"zero_optimization": {"stage": int(stage), **blocks}})
    return "deepspeed", value, _STAGE


def _fsdp(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """The strategy, of which each version of FSDP has a variable."""
    if environment.get("FSDP_VERSION") == "2":
        name = "FSDP_RESHARD_AFTER_FORWARD"
        is_kept = environment.get(name, "true").lower() in _OFF
        return "fsdp", "shard_grad_op" if is_kept else "full_shard", name
    name = "FSDP_SHARDING_STRATEGY"
    return "fsdp", (_asked(environment, name) or "full_shard").lower(), name


def _splits(environment: Mapping[str, str]) -> Iterator[Problem]:
    """A problem for each way to split the model that covey does not have."""
    shard = Fix(text=tr("shard the model over all processes instead"), edits={"fsdp": "full_shard"})
    for name, (nothing, words) in _SPLITS.items():
        if value := _asked(environment, name, nothing):
            yield _refused("fsdp", name, value, words, shard)
    for name in _DEVICES.values():
        if device := _asked(environment, name, "cpu"):
            stage = 3 if environment.get(_STAGE) == "3" else 2
            memory = Fix(text=tr("offload to CPU memory"), edits={"deepspeed": f"zero{stage}_offload"})
            yield _refused("deepspeed", name, device, tr("offloading to disks"), memory)


def _precision(environment: Mapping[str, str]) -> Iterator[Problem]:
    name = "ACCELERATE_MIXED_PRECISION"
    if dtype := _asked(environment, name, "bf16"):
        bfloat16 = Fix(text=tr("compute in bfloat16"), edits={"torch_dtype": "bfloat16"})
        yield _refused("torch_dtype", name, dtype, tr("training in {dtype}", dtype=dtype), bfloat16)


def _compiler_and_tpus(environment: Mapping[str, str]) -> Iterator[Problem]:
    name = "ACCELERATE_DYNAMO_BACKEND"
    if backend := _asked(environment, name):
        off = Fix(text=tr("set the backend of dynamo to no in the file or the command of accelerate"))
        yield _refused("torch_compile", name, backend, tr("a compiled model"), off)
    for name in _OF_TPU:
        if value := _asked(environment, name):
            gpus = Fix(text=tr("start the same command on a machine with NVIDIA or AMD GPUs"))
            yield _refused("nproc_per_node", name, value, tr("training on TPUs"), gpus)


def _refused(option: str, name: str, value: str, words: str, *fixes: Fix) -> Problem:
    return Problem(
        code="E379",
        option=option,
        seen=tr(
            "The environment variable {name} is {value}. It asks for {words}, which covey does not do.",
            name=name,
            value=value,
            words=words,
        ),
        why=CODES["E379"].why,
        cause=tr("The variable comes from a configuration file of accelerate, or from its command."),
        fixes=fixes,
    )


def _one_process(environment: Mapping[str, str]) -> Iterator[Problem]:
    """W192: without `--multi_gpu` accelerate sets the address at which several processes meet, but starts
    only one."""
    is_of_accelerate = environment.get("ACCELERATE_MIXED_PRECISION") and environment.get("MASTER_ADDR")
    is_one_of_several = any(environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES"))
    if not is_of_accelerate or is_one_of_several:
        return
    seen = tr(
        "MASTER_ADDR is set, as `accelerate launch` sets it for several processes, but RANK and WORLD_SIZE "
        "are not set: accelerate has started only this process."
    )
    own = Fix(text=tr("let covey start N processes: covey train ... --nproc_per_node N"))
    gpus = Fix(text=tr("on GPUs: accelerate launch --multi_gpu --num_processes N -m covey train ..."))
    yield Problem(
        code="W192",
        option="nproc_per_node",
        seen=seen,
        why=CODES["W192"].why,
        fixes=(own, gpus),
        severity=Severity.WARNING,
    )


def _note(taken: list[str]) -> Problem:
    return Problem(
        code="W193",
        option="accelerate",
        seen=tr("The environment of accelerate launch sets {taken}.", taken=joined(", ", taken)),
        why=CODES["W193"].why,
        severity=Severity.NOTE,
    )
