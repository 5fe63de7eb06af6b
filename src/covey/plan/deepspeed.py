"""A configuration file of DeepSpeed: its ZeRO stage, what it offloads, and the numbers of its batch.

The names are those of DeepSpeed's page on its configuration (deepspeed.ai/docs/config-json). Nothing else is
read; of what changes the memory, and the forecast does not follow, a warning speaks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.fixes import edits_to
from covey.plan.fsdp import fsdp_states
from covey.plan.layout import STAGES, DeepSpeedFile, Machine, Offload, States
from covey.plan.problem import problem, warning
from covey.plan.shape import Shape, faults, in_range, shape_of, with_product
from covey.types import Fix, Problem

PRESETS: Mapping[str, tuple[int, Offload]] = {
    "zero0": (0, "none"),
    "zero1": (1, "none"),
    "zero2": (2, "none"),
    "zero3": (3, "none"),
    "zero2_offload": (2, "optimizer"),
    "zero3_offload": (3, "params"),
}
"""ms-swift's names of its DeepSpeed configurations."""

_DEVICES = ("none", "cpu", "nvme")
_TOTAL, _ROWS, _PASSES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Settings of zero_optimization that change the memory, with the highest value that the forecast stands for.
_UNFOLLOWED = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": 0,
    "zero_quantized_weights": 0,
    "zero_quantized_nontrainable_weights": 0,
    "cpu_offload": 0,
    "cpu_offload_param": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFile:
    """What was read of a file, and what is wrong with it; with errors the rest stands for nothing."""

    file: DeepSpeedFile
    stage: int = 0
    offload: Offload = "none"
    problems: tuple[Problem, ...] = ()


def from_content(content: Any, path: str) -> FromFile:
    """Return the layout of a file's JSON, with every problem of it: E217 for a value of a wrong type, E218
    for a stage or a device that DeepSpeed has not, W117 for what the forecast leaves out."""
    if not isinstance(content, Mapping):
        return FromFile(file=DeepSpeedFile(path=path), problems=(unreadable(path, "it is no object"),))
    problems: list[Problem] = []
    numbers = {name: _number(content, name, path, problems) for name in (_TOTAL, _ROWS, _PASSES)}
    zero = _part(content, "zero_optimization", path, problems)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        problems.append(_unknown(path, "zero_optimization.stage", stage, tuple(map(str, STAGES))))
    kinds = {name: _part(zero, name, path, problems) for name in ("offload_optimizer", "offload_param")}
    devices = {name: _device(kind, name, path, problems) for name, kind in kinds.items()}
    has_optimizer, has_params = (device != "none" for device in devices.values())
    # Weights alone are offloaded in stage 3 only; in a lower one that is a fault of its own.
    alone = has_params and not has_optimizer and stage == 3
    offload: Offload = "params" if has_params and not alone else "optimizer" if has_optimizer else "none"
    left_out = [f"zero_optimization.{name}" for name, most in _UNFOLLOWED.items() if _above(zero, name, most)]
    left_out += [f"{name} to nvme" for name, device in devices.items() if device == "nvme"]
    left_out += [f"{name}.ratio" for name, kind in kinds.items() if kind.get("ratio", 1) not in (1, "auto")]
    left_out += ["offload_param without offload_optimizer"] if alone else []
    if left_out:
        problems.append(_left_out(path, left_out))
    return FromFile(
        file=DeepSpeedFile(path=path, **numbers),
        stage=stage if type(stage) is int else 0,
        offload=offload,
        problems=tuple(problems),
    )


def _part(content: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> Mapping[str, Any]:
    value = content.get(name)
    if value is None or isinstance(value, Mapping):
        return value or {}
    problems.append(unreadable(path, f"{name} is {value!r} and no object"))
    return {}


def _number(content: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> int | None:
    value = content.get(name)
    if value is None or value == "auto":
        return None
    if type(value) is int and in_range(value):
        return value
    problems.append(unreadable(path, f'{name} is {value!r}, neither a count nor "auto"'))
    return None


def _device(kind: Mapping[str, Any], name: str, path: str, problems: list[Problem]) -> str:
    device = kind.get("device") or "none"
    if device in _DEVICES:
        return str(device)
    problems.append(_unknown(path, f"{name}.device", device, _DEVICES))
    return "none"


def _above(content: Mapping[str, Any], name: str, most: float) -> bool:
    """Whether a value is a number, or true, above the highest; "auto" is none."""
    value = content.get(name)
    return isinstance(value, int | float) and value > most


def unreadable(path: str, words: str) -> Problem:
    """Return the problem of a file that is no configuration of DeepSpeed."""
    return problem(
        "E217",
        "deepspeed",
        f"{path} cannot be read as a configuration of DeepSpeed: {words}.",
        "Another file, or one that was cut short or edited.",
        Fix(text='a JSON object such as {"zero_optimization": {"stage": 3}}'),
        Fix(text=f"one of the names {', '.join(PRESETS)}"),
    )


def _unknown(path: str, name: str, value: Any, choices: tuple[str, ...]) -> Problem:
    seen = f"{path}: {name} is {value!r}; DeepSpeed has {', '.join(choices)}."
    fix = Fix(text=f"one of {', '.join(choices)} in {path}")
    return problem("E218", "deepspeed", seen, "A slip of the hand, or the spelling of another tool.", fix)


def _left_out(path: str, names: list[str]) -> Problem:
    seen = f"{path} has {', '.join(names)}, which the forecast leaves out."
    fix = Fix(text="take the forecast for that of a run without them")
    return warning("W117", "zero_optimization", seen, "A file made for a run of DeepSpeed.", fix)


def states_of(
    config: Config, machine: Machine | None, read: FromFile | None
) -> tuple[States, tuple[Problem, ...]]:
    """Return where the states lie by `deepspeed`, of which `read` is the file, or by `fsdp`, with every
    problem of them; what is typed of a machine stands over a name, and has to say the same as a file."""
    sharded, problems = fsdp_states(config)
    if config.deepspeed and sharded.stage:
        problems.append(_both(config))
    if read is not None:
        problems += read.problems
        stage, offload = read.stage, read.offload
    elif config.deepspeed:
        stage, offload = PRESETS.get(config.deepspeed.lower(), (0, "none"))
        if config.deepspeed.lower() not in PRESETS:
            problems.append(_no_preset(config.deepspeed))
    else:
        stage, offload = sharded.stage, sharded.offload
    typed_stage = None if machine is None else machine.zero_stage
    typed_offload = None if machine is None else machine.offload
    if read is not None and typed_stage not in (None, stage):
        problems.append(other_than_typed(read.file.path, "plan_zero_stage", str(typed_stage), str(stage)))
    elif typed_stage is not None:
        stage = typed_stage
    if read is not None and typed_offload not in (None, offload):
        problems.append(other_than_typed(read.file.path, "plan_offload", str(typed_offload), offload))
    elif typed_offload is not None:
        offload = typed_offload
    file = None if read is None else read.file
    return States(
        stage=stage,
        offload=offload,
        file=file,
        fsdp=sharded.fsdp and not config.deepspeed,
        is_hybrid=sharded.is_hybrid,
    ), tuple(problems)


def _no_preset(word: str) -> Problem:
    takes = f"one of {', '.join(PRESETS)}, or the path of a JSON file"
    seen = f"deepspeed is {word}; it takes {takes}, and there is no such file."
    cause = "A slip of the hand, or a file that lies elsewhere."
    return problem("E104", "deepspeed", seen, cause, Fix(text=f"--deepspeed takes {takes}"))


def _both(config: Config) -> Problem:
    seen = f"deepspeed is {config.deepspeed}, and fsdp is {config.fsdp}: only one can shard the model."
    fixes = (Fix(text="DeepSpeed", edits={"fsdp": None}), Fix(text="FSDP", edits={"deepspeed": None}))
    return problem("E115", "fsdp", seen, "Two commands were merged.", *fixes)


def other_than_typed(path: str, name: str, typed: str, of_file: str) -> Problem:
    """Return the problem of a word beside a file that says something else."""
    return problem(
        "E219",
        name,
        f"{name} is {typed} (flag --{name}), and {path} says {of_file}.",
        "A file for one layout, and words for another.",
        Fix(text=f"leave out --{name}, or change it in {path}"),
    )


def batch_of_file_problems(
    config: Config, facts: Facts, typed: Collection[str] | None = None
) -> list[Problem]:
    """Return where the batch numbers of the layout's file are not those of the run (E219)."""
    file = facts.layout.file
    if file is None:
        return []
    shape = shape_of(config, facts.num_processes)
    if faults(shape, None):
        return []
    ours = _as_deepspeed(shape)
    wrong = [name for name, value in ours.items() if getattr(file, name) not in (None, value)]
    if not wrong:
        return []
    says = " and ".join(f"{name} is {getattr(file, name)}" for name in wrong)
    has = " and ".join(str(ours[name]) for name in wrong)
    target = _of_file(shape, file)
    fixes = [Fix(text=f'"auto" for {" and ".join(wrong)} in {file.path}')]
    if target is not None and not faults(target, facts.num_prompts):
        fixes.insert(0, Fix(text="the batch of the file", edits=edits_to(shape, target, typed)))
    seen = f"{file.path}: {says}; this run has {has}."
    return [problem("E219", "deepspeed", seen, "A file for another batch or for another machine.", *fixes)]


def _as_deepspeed(shape: Shape) -> dict[str, int]:
    """The numbers of a batch by DeepSpeed's names; train_batch_size is the product of the others and N."""
    return {
        _TOTAL: shape.completions_per_step,
        _ROWS: shape.per_device_train_batch_size,
        _PASSES: shape.gradient_accumulation_steps,
    }


def _of_file(shape: Shape, file: DeepSpeedFile) -> Shape | None:
    """The shape with the file's numbers, and as many steps from a rollout; None where they contradict each
    other."""
    rows = file.train_micro_batch_size_per_gpu or shape.per_device_train_batch_size
    passes = file.gradient_accumulation_steps or shape.gradient_accumulation_steps
    if file.train_batch_size and not file.gradient_accumulation_steps:
        passes = max(1, file.train_batch_size // (shape.num_processes * rows))
    steps = max(1, shape.steps_per_generation // shape.gradient_accumulation_steps)
    target = with_product(
        replace(shape, per_device_train_batch_size=rows),
        gradient_accumulation_steps=passes,
        steps_per_generation=steps * passes,
    )
    return target if file.train_batch_size in (None, target.completions_per_step) else None
