"""A DeepSpeed file beside the command: numbers that contradict it, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from covey.options.schema import Config
from covey.plan.deepspeed import KEPT, KEPT_ZERO
from covey.plan.deepspeed_file import PASSES, REFUSED, ROWS, TOTAL, ZERO, is_on, setting
from covey.plan.facts import Facts, LaunchFacts, MachineFacts, PromptFacts
from covey.plan.fixes import edits_to
from covey.plan.layout import DeepSpeedFile, computes_low
from covey.plan.problem import problem, warning
from covey.plan.shape import Shape, faults, shape_of, with_product
from covey.texts import joined, plural, tr
from covey.types import Fix, Problem

# Numbers of a file, each with the option that says the same.
_SAME = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
_BETAS = "optimizer.params.betas"
# DeepSpeed's schedules, each with what lr_scheduler_type calls it.
_SCHEDULES = {
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine",),
}
# Settings that covey does not pass on, by what it does instead.
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "gradients are summed, and sent between ranks, in float32": (
        "data_types.grad_accum_dtype", "communication_data_type", "prescale_gradients",
        "gradient_predivide_factor", "sparse_gradients", "bf16.immediate_grad_update",
    ),
    "masters and moments are float32": (
        "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states",
        "fp16.fp16_master_weights_and_grads",
    ),
    "gradients are checked for values that are not finite before each step": ("bf16.check_grad_overflow",),
    "the batch is that of the command": ("elasticity",),
    "--dataset_shuffle and --data_seed set the order of prompts": (
        "dataloader_drop_last", "curriculum_learning", "data_efficiency",
    ),
    "checkpoints are safetensors, saved by --save_steps": ("checkpoint", "nebula", "datastates_ckpt"),
    "the optimizer is torch's AdamW, on the CPU too": ("zero_force_ds_cpu_optimizer",),
    "--gradient_checkpointing sets what is recomputed": ("activation_checkpointing",),
    "metrics.jsonl has times and memory of each phase": (
        "flops_profiler", "wall_clock_breakdown", "memory_breakdown",
    ),
    "--report_to turns on trackers": ("tensorboard", "wandb"),
}  # fmt: skip
_INSTEAD_OF = {name: words for words, names in _INSTEAD.items() for name in names}

# Not warned of: what the layout, the batch or the checks above have read, and what changes nothing.
_READ = frozenset(
    {ZERO, TOTAL, ROWS, PASSES, "gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "data_types",
     "zero_allow_untested_optimizer", "steps_per_print", "aio", *KEPT, *(n.split(".")[0] for n in REFUSED)}
)  # fmt: skip
_READ_ZERO = frozenset(
    {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param",
     "cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save", *KEPT_ZERO,
     *(n.split(".")[1] for n in REFUSED if n.startswith(f"{ZERO}."))}
)  # fmt: skip
_BLOCKS = ("fp16", "bf16", "data_types")


@dataclass(frozen=True, slots=True)
class _Other:
    """A setting of a file that is not what the command says, and the options that would say it."""

    of_file: str
    of_run: str
    edits: Mapping[str, Any]


def deepspeed_problems(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return where the layout's file contradicts the command (E219), and what of it has no effect (W126)."""
    file = facts.layout.file
    if file is None:
        return []
    others = [*_dtypes(config, facts.machine, file), *_numbers(config, file)]
    problems = [_contradicts(file.path, others)] if others else []
    return [
        *_batch(config, facts.prompts, facts.launch, file, typed),
        *problems,
        *_without_effect(config, file),
    ]


def _dtypes(config: Config, machine: MachineFacts, file: DeepSpeedFile) -> Iterator[_Other]:
    is_low = computes_low(config, cuda=bool(machine.cuda))
    name = "bfloat16" if is_low else "float32"
    run = tr("torch_dtype {torch_dtype}", torch_dtype=config.torch_dtype) + (
        tr(", {name} in this run", name=name) if config.torch_dtype == "auto" else ""
    )
    low, half = (setting(file.settings, f"{kind}.enabled") for kind in ("bf16", "fp16"))
    if half is True:
        yield _Other(tr("fp16.enabled true"), run, {})
    elif isinstance(low, bool) and low != is_low:
        edits = {"torch_dtype": "bfloat16" if low else "float32"}
        yield _Other(tr("bf16.enabled {low}", low=str(low).lower()), run, edits)


def _numbers(config: Config, file: DeepSpeedFile) -> Iterator[_Other]:
    for name, option in _SAME.items():
        value, ours = setting(file.settings, name), getattr(config, option)
        if isinstance(value, bool) or not isinstance(value, int | float) or _agree(config, option, value):
            continue
        edits = {option: int(value) if isinstance(ours, int) else float(value)}
        yield _Other(f"{name} {value:g}", f"{option} {ours:g}", edits)
    betas, ours = setting(file.settings, _BETAS), (config.adam_beta1, config.adam_beta2)
    if isinstance(betas, list) and len(betas) == 2 and tuple(betas) != ours:
        edits = {"adam_beta1": betas[0], "adam_beta2": betas[1]}
        yield _Other(
            f"{_BETAS} {betas}",
            tr("adam_beta1 {beta1:g} and adam_beta2 {beta2:g}", beta1=ours[0], beta2=ours[1]),
            edits,
        )


def _agree(config: Config, option: str, value: float) -> bool:
    """Whether an option has the value; a warm-up by ratio and a length in epochs are not compared."""
    if (option == "warmup_steps" and config.warmup_ratio) or (option == "max_steps" and config.max_steps < 1):
        return True
    return isclose(getattr(config, option), value, rel_tol=1e-9)


def _contradicts(path: str, others: list[_Other]) -> Problem:
    says = ", ".join(other.of_file for other in others)
    has = ", ".join(dict.fromkeys(other.of_run for other in others))
    names = ", ".join(other.of_file.split()[0] for other in others)
    auto = tr('set {names} to "auto" in {path}', names=names, path=path)
    if all(other.edits for other in others):
        edits = {name: value for other in others for name, value in other.edits.items()}
        fixes = [
            Fix(text=tr("use the values of the file"), edits=edits),
            Fix(text=tr("{auto}: then the options of the command are used", auto=auto)),
        ]
    else:
        fixes = [Fix(text=tr("{auto}: covey trains in bfloat16 or float32, not in float16", auto=auto))]
    seen = tr("{path} says {says}, but this run has {has}.", path=path, says=says, has=has)
    return problem("E219", "deepspeed", seen, "", *fixes)


def _without_effect(config: Config, file: DeepSpeedFile) -> list[Problem]:
    """Return one warning that names the entries of a file that covey neither passes on nor reads."""
    found = {name: _INSTEAD_OF.get(name, "") for name in _asked(file.settings)}
    unknown = [name for name, words in found.items() if not words]
    schedule = setting(file.settings, "scheduler.type")
    if schedule is not None and config.lr_scheduler_type not in _SCHEDULES.get(str(schedule), ()):
        found[f"scheduler.type {schedule}"] = tr(
            "the schedule is set by --lr_scheduler_type {lr_scheduler_type}",
            lr_scheduler_type=config.lr_scheduler_type,
        )
    if not found:
        return []
    instead = joined("; ", dict.fromkeys(words for words in found.values() if words))
    advice = [tr("check the spelling of {unknown}", unknown=joined(", ", unknown))] if unknown else []
    advice += [tr("in covey, {instead}", instead=instead)] if instead else []
    seen = plural(
        len(found),
        "{path} sets {names}, which has no effect.",
        "{path} sets {names}, which have no effect.",
        path=file.path,
        names=joined(", ", found),
    )
    cause = tr("The file was written for another trainer.")
    return [warning("W126", "deepspeed", seen, cause, Fix(text=joined("; ", advice)))]


def _asked(content: Mapping[str, Any]) -> Iterator[str]:
    """The settings that ask for something and are not among those that were read, by their names."""
    for name in content:
        if name not in _READ and is_on(name, content[name]):
            yield name
    for block in _BLOCKS:
        for name, value in (content.get(block) or {}).items():
            if f"{block}.{name}" in _INSTEAD_OF and is_on(f"{block}.{name}", value):
                yield f"{block}.{name}"
    for name, value in (content.get(ZERO) or {}).items():
        if name not in _READ_ZERO and is_on(f"{ZERO}.{name}", value):
            yield f"{ZERO}.{name}"


def _batch(
    config: Config,
    prompts: PromptFacts,
    launch: LaunchFacts,
    file: DeepSpeedFile,
    typed: Collection[str] | None,
) -> list[Problem]:
    """Where the batch numbers of the file are not those of the run (E219)."""
    shape = shape_of(config, launch.num_processes)
    if faults(shape, None):
        return []
    ours = _as_deepspeed(shape)
    wrong = [name for name, value in ours.items() if getattr(file, name) not in (None, value)]
    if not wrong:
        return []
    says = joined(
        tr(" and "), [tr("{name} is {value}", name=name, value=getattr(file, name)) for name in wrong]
    )
    has = joined(tr(" and "), [str(ours[name]) for name in wrong])
    fixes = [
        Fix(text=tr('set {wrong} to "auto" in {path}', wrong=joined(tr(" and "), wrong), path=file.path))
    ]
    target = _of_file(shape, file)
    if target is not None and not faults(target, prompts.num_used):
        fixes.insert(0, Fix(text=tr("use the batch of the file"), edits=edits_to(shape, target, typed)))
    seen = tr("{path} says {says}, but this run has {has}.", path=file.path, says=says, has=has)
    cause = tr("The file was written for another batch or another number of GPUs.")
    return [problem("E219", "deepspeed", seen, cause, *fixes)]


def _as_deepspeed(shape: Shape) -> dict[str, int]:
    """The numbers of a batch by DeepSpeed's names; train_batch_size is the product of the others and N."""
    return {
        TOTAL: shape.completions_per_step,
        ROWS: shape.per_device_train_batch_size,
        PASSES: shape.gradient_accumulation_steps,
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
