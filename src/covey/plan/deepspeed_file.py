"""A configuration file of DeepSpeed: its ZeRO stage, what it offloads, and what of it covey cannot run.

The names are those of DeepSpeed's page on its configuration (deepspeed.ai/docs/config-json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.plan.layout import PRESETS, STAGES, DeepSpeedFile, Offload
from covey.plan.problem import problem, warning
from covey.plan.shape import in_range
from covey.texts import joined, tr
from covey.types import Fix, Problem

TOTAL, ROWS, PASSES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO = "zero_optimization"

_DEVICES = ("none", "cpu", "nvme")
# Old names of offloading to the machine's memory, each a switch.
_SWITCHES = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
# The largest sizes that the forecast stands for.
_FORECAST = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
_ADAM = ("adam", "adamw", "torch_adam", "fusedadam")

_FEWER_BITS = tr("it sends weights or gradients between processes in fewer bits, which changes the results")
_OTHER_COPIES = tr("it keeps more copies of the weights, which covey neither saves nor restores")
_OTHER_MODEL = tr("it changes the model during training")
_SPLIT = tr("it splits layers or sequences over GPUs, which covey does not do")
_CASTS = tr("it changes dtypes inside the forward pass, which covey computes in --torch_dtype")
_STEPS_AHEAD = tr("it delays parts of an optimizer step, but covey always applies a step completely")

REFUSED: Mapping[str, str] = {
    f"{ZERO}.zero_hpz_partition_size": _OTHER_COPIES,
    f"{ZERO}.mics_shard_size": _OTHER_COPIES,
    f"{ZERO}.zero_quantized_weights": _FEWER_BITS,
    f"{ZERO}.zero_quantized_nontrainable_weights": _FEWER_BITS,
    f"{ZERO}.zero_quantized_gradients": _FEWER_BITS,
    f"{ZERO}.zeropp_loco_param": _FEWER_BITS,
    f"{ZERO}.zenflow": _STEPS_AHEAD,
    f"{ZERO}.offload_optimizer.super_offload": _STEPS_AHEAD,
    "amp.enabled": _CASTS,
    "torch_autocast.enabled": _CASTS,
    "tensor_parallel.autotp_size": _SPLIT,
    "sequence_parallel_size": _SPLIT,
    "expert_parallel": _SPLIT,
    "pipeline": _SPLIT,
    "sparse_attention": _OTHER_MODEL,
    "compression_training": _OTHER_MODEL,
    "quantize_training.enabled": _OTHER_MODEL,
    "progressive_layer_drop.enabled": _OTHER_MODEL,
}
"""Settings that covey refuses where they are on, each with the reason."""

# Values that switch a setting off, beside those that do for every setting.
_OFF: Mapping[str, int | str] = {
    f"{ZERO}.zero_hpz_partition_size": 1,
    "tensor_parallel.autotp_size": 1,
    "sequence_parallel_size": 1,
    "gradient_predivide_factor": 1,
    "data_types.grad_accum_dtype": "fp32",
    "communication_data_type": "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFile:
    """What was read of a file, and what is wrong with it; where that is an error, the rest is not used."""

    file: DeepSpeedFile
    stage: int = 0
    offload: Offload = "none"
    problems: tuple[Problem, ...] = ()


def from_content(content: Any, path: str) -> FromFile:
    """Return the layout of a file's JSON, with every problem of it: E217 for a value of a wrong type, E218
    for a stage or a device that DeepSpeed does not have, E220 for what covey cannot run, W117 for what the
    forecast leaves out."""
    if not isinstance(content, Mapping):
        return FromFile(
            file=DeepSpeedFile(path=path), problems=(unreadable(path, tr("it is not a JSON object")),)
        )
    problems: list[Problem] = []
    numbers = {name: _number(content, name, path, problems) for name in (TOTAL, ROWS, PASSES)}
    zero = _part(content, ZERO, path, problems)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        problems.append(_unknown(path, f"{ZERO}.stage", stage, tuple(map(str, STAGES))))
    kinds = {name: _part(zero, name, path, problems) for name in _SWITCHES}
    devices = {
        name: "cpu" if zero.get(_SWITCHES[name]) is True else _device(kind, name, path, problems)
        for name, kind in kinds.items()
    }
    for name in ("optimizer", "scheduler"):
        _part(_part(content, name, path, problems), "params", path, problems)
    for name in ("fp16", "bf16", "data_types"):
        _part(content, name, path, problems)
    has_optimizer, has_params = (device != "none" for device in devices.values())
    # Weights alone can be offloaded in stage 3; in a lower one that is E213.
    alone = has_params and not has_optimizer and stage == 3
    offload: Offload = "params" if has_params and not alone else "optimizer" if has_optimizer else "none"
    problems += _refused(content, path, kinds, devices)
    left_out = [f"{ZERO}.{name}" for name, most in _FORECAST.items() if _above(zero, name, most)]
    left_out += [tr("offload_param without offload_optimizer")] if alone else []
    if left_out:
        problems.append(_left_out(path, left_out))
    return FromFile(
        file=DeepSpeedFile(path=path, settings=content, **numbers),
        stage=stage if type(stage) is int else 0,
        offload=offload,
        problems=tuple(problems),
    )


def setting(content: Mapping[str, Any], name: str) -> Any:
    """Return a setting by its name with dots, as `optimizer.params.lr`; None where it is missing or
    "auto"."""
    value: Any = content
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


def _refused(
    content: Mapping[str, Any], path: str, kinds: Mapping[str, Mapping[str, Any]], devices: Mapping[str, str]
) -> list[Problem]:
    """What would make another run of it, or one that nobody has tried, one problem each."""
    found = [(name, why) for name, why in REFUSED.items() if is_on(name, setting(content, name))]
    nvme = tr("covey offloads to CPU memory, not to disks")
    found += [(f"{ZERO}.{n}.device", nvme) for n, device in devices.items() if device == "nvme"]
    if kinds["offload_optimizer"].get("ratio", 1) not in (1, "auto"):
        found.append(
            (f"{ZERO}.offload_optimizer.ratio", tr("covey offloads all of the optimizer or none of it"))
        )
    kind = setting(content, "optimizer.type")
    if isinstance(kind, str) and kind.lower() not in _ADAM:
        found.append(("optimizer.type", tr("covey trains with AdamW")))
    if setting(content, "optimizer.params.adam_w_mode") is False:
        found.append(("optimizer.params.adam_w_mode", tr("covey's weight decay is decoupled")))
    return [_cannot_run(path, name, setting(content, name), why) for name, why in found]


def is_on(name: str, value: Any) -> bool:
    """Whether a setting asks for something: it is not missing, "auto", off, or a block that is disabled."""
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False
    if isinstance(value, int | float) and value <= 0:
        return False
    return bool(value) and value not in ("auto", _OFF.get(name))


def _part(content: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> Mapping[str, Any]:
    value = content.get(name)
    if value is None or isinstance(value, Mapping):
        return value or {}
    problems.append(unreadable(path, tr("{name} is {value!r}, not a JSON object", name=name, value=value)))
    return {}


def _number(content: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> int | None:
    value = content.get(name)
    if value is None or value == "auto":
        return None
    if type(value) is int and in_range(value):
        return value
    problems.append(
        unreadable(path, tr('{name} is {value!r}, neither a count nor "auto"', name=name, value=value))
    )
    return None


def _device(kind: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> str:
    device = kind.get("device") or "none"
    if device in _DEVICES:
        return str(device)
    problems.append(_unknown(path, f"{name}.device", device, _DEVICES))
    return "none"


def _above(content: Mapping[str, Any], name: str, most: float) -> bool:
    """Whether a value is a number above the highest; "auto" is none."""
    value = content.get(name)
    return isinstance(value, int | float) and value > most


def unreadable(path: str, words: str) -> Problem:
    """Return the problem of a file that is no configuration of DeepSpeed."""
    return problem(
        "E217",
        "deepspeed",
        tr("{path} cannot be read as a configuration of DeepSpeed: {words}.", path=path, words=words),
        tr("The file is another one, incomplete, or was edited."),
        Fix(text=tr('write a JSON object such as {"zero_optimization": {"stage": 3}}')),
        Fix(text=tr("use one of the names {presets}", presets=joined(", ", PRESETS))),
    )


def _unknown(path: str, name: str, value: Any, choices: tuple[str, ...]) -> Problem:
    seen = tr(
        "{path}: {name} is {value!r}; DeepSpeed has {choices}.",
        path=path,
        name=name,
        value=value,
        choices=joined(", ", choices),
    )
    fix = Fix(text=tr("use one of {choices} in {path}", choices=joined(", ", choices), path=path))
    return problem("E218", "deepspeed", seen, "", fix)


def _cannot_run(path: str, name: str, value: Any, why: str) -> Problem:
    seen = tr(
        "{path}: {name} is {value!r}. covey does not run with it: {why}.",
        path=path,
        name=name,
        value=value,
        why=why,
    )
    fix = (
        tr('set {name} to "cpu" in {path}', name=name, path=path)
        if name.endswith(".device")
        else tr("remove {name} from {path}", name=name, path=path)
    )
    return problem("E220", "deepspeed", seen, tr("The file was written for another trainer."), Fix(text=fix))


def _left_out(path: str, names: list[str]) -> Problem:
    seen = tr("{path} has {names}, which the forecast does not count.", path=path, names=joined(", ", names))
    fix = Fix(text=tr("no action is needed; the forecast is made as if the file did not have them"))
    return warning("W117", ZERO, seen, "", fix)
