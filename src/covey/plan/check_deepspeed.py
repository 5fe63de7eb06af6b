"""A DeepSpeed file beside the command: numbers that contradict it, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from covey.options.schema import Config
from covey.plan.deepspeed import KEPT, KEPT_ZERO, computes_low
from covey.plan.deepspeed_file import PASSES, REFUSED, ROWS, TOTAL, ZERO, setting
from covey.plan.facts import Facts
from covey.plan.fixes import edits_to
from covey.plan.layout import DeepSpeedFile
from covey.plan.problem import problem, warning
from covey.plan.shape import Shape, faults, shape_of, with_product
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
# Of DeepSpeed's schedules, what lr_scheduler_type calls them.
_SCHEDULES = {
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine",),
}
_SUMS = "gradients are summed, and sent between ranks, in float32"
_STATES = "masters and moments are float32"
_CHECKS = "every gradient is checked for values that are not finite before it is applied"
_BATCH = "the batch options of the command hold"
_DATA = "prompts come in covey's order (--dataset_shuffle, --data_seed)"
_SAVING = "checkpoints are covey's own, of safetensors (--save_steps)"
_LOGGING = "metrics.jsonl has times and memory of each phase"
_INSTEAD: Mapping[str, str] = {
    "data_types.grad_accum_dtype": _SUMS,
    "communication_data_type": _SUMS,
    "prescale_gradients": _SUMS,
    "gradient_predivide_factor": _SUMS,
    "sparse_gradients": _SUMS,
    "bf16.immediate_grad_update": _SUMS,
    "bf16.bf16_master_weights_and_grads": _STATES,
    "bf16.bf16_optimizer_states": _STATES,
    "fp16.fp16_master_weights_and_grads": _STATES,
    "bf16.check_grad_overflow": _CHECKS,
    "elasticity": _BATCH,
    "dataloader_drop_last": _DATA,
    "curriculum_learning": _DATA,
    "data_efficiency": _DATA,
    "checkpoint": _SAVING,
    "nebula": _SAVING,
    "datastates_ckpt": _SAVING,
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW, on the CPU too",
    "activation_checkpointing": "--gradient_checkpointing says what is computed again",
    "flops_profiler": _LOGGING,
    "wall_clock_breakdown": _LOGGING,
    "memory_breakdown": _LOGGING,
    "tensorboard": "--report_to tensorboard",
    "wandb": "--report_to wandb",
}
"""Settings that covey does not pass on, each with what holds in its place."""

# Without a word: what the layout, the batch or the checks above have read, and what changes nothing.
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
    others = [*_dtypes(config, facts, file), *_numbers(config, file)]
    problems = [_contradicts(file.path, others)] if others else []
    return [*_batch(config, facts, file, typed), *problems, *_without_effect(config, file)]


def _dtypes(config: Config, facts: Facts, file: DeepSpeedFile) -> Iterator[_Other]:
    is_low = computes_low(config, cuda=bool(facts.cuda))
    name = "bfloat16" if is_low else "float32"
    run = f"torch_dtype {config.torch_dtype}" + (f", {name} here" if config.torch_dtype == "auto" else "")
    low, half = (setting(file.settings, f"{kind}.enabled") for kind in ("bf16", "fp16"))
    if half is True:
        yield _Other("fp16.enabled true", run, {})
    if isinstance(low, bool) and low != is_low and half is not True:
        edits = {"torch_dtype": "bfloat16" if low else "float32"}
        yield _Other(f"bf16.enabled {str(low).lower()}", run, edits)


def _numbers(config: Config, file: DeepSpeedFile) -> Iterator[_Other]:
    for name, option in _SAME.items():
        value, ours = setting(file.settings, name), getattr(config, option)
        if isinstance(value, bool) or not isinstance(value, int | float) or _agree(config, option, value):
            continue
        edits = {option: int(value) if isinstance(ours, int) else float(value)}
        yield _Other(f"{name} {value:g}", f"{option} {ours:g}", edits)
    betas, ours = setting(file.settings, _BETAS), (config.adam_beta1, config.adam_beta2)
    if isinstance(betas, list) and len(betas) == 2 and tuple(betas) != ours:
        first, second = betas
        edits = {"adam_beta1": first, "adam_beta2": second}
        yield _Other(f"{_BETAS} {betas}", f"adam_beta1 {ours[0]:g} and adam_beta2 {ours[1]:g}", edits)


def _agree(config: Config, option: str, value: float) -> bool:
    """Whether an option has the value; warm-up and length that the command gives in another way are not
    compared."""
    if (option == "warmup_steps" and config.warmup_ratio) or (option == "max_steps" and config.max_steps < 1):
        return True
    return isclose(getattr(config, option), value, rel_tol=1e-9)


def _contradicts(path: str, others: list[_Other]) -> Problem:
    says = ", ".join(other.of_file for other in others)
    has = ", ".join(dict.fromkeys(other.of_run for other in others))
    edits: dict[str, Any] = {}
    for other in others:
        edits |= other.edits
    names = ", ".join(other.of_file.split()[0] for other in others)
    auto = Fix(text=f'"auto" for {names} in {path}: then the command decides')
    if any(not other.edits for other in others):
        auto = Fix(text=f'"auto" for {names} in {path}: covey trains in bfloat16 or float32, not in float16')
        edits = {}
    fixes = [*([Fix(text="as the file has it", edits=edits)] if edits else []), auto]
    seen = f"{path} says {says}; this run has {has}."
    return problem("E219", "deepspeed", seen, "A file for another run.", *fixes)


def _without_effect(config: Config, file: DeepSpeedFile) -> list[Problem]:
    """What of a file covey neither passes on nor reads, in one warning."""
    content, found = file.settings, dict[str, str]()
    for name in _asked(content):
        found[name] = _INSTEAD.get(name, "")
    schedule = setting(content, "scheduler.type")
    if schedule is not None and config.lr_scheduler_type not in _SCHEDULES.get(str(schedule), ()):
        found[f"scheduler.type {schedule}"] = f"--lr_scheduler_type {config.lr_scheduler_type} holds"
    if not found:
        return []
    instead = "; ".join(dict.fromkeys(words for words in found.values() if words))
    fixes = (Fix(text=instead),) if instead else ()
    seen = f"{file.path} sets {', '.join(found)}, which {'has' if len(found) == 1 else 'have'} no effect."
    return [warning("W126", "deepspeed", seen, "A file made for another trainer.", *fixes)]


def _asked(content: Mapping[str, Any]) -> Iterator[str]:
    """The settings that ask for something and are not among those that were read, by their names."""
    for name in content:
        if name not in _READ and _is_on(name, content[name]):
            yield name
    for block in _BLOCKS:
        for name, value in (content.get(block) or {}).items():
            if f"{block}.{name}" in _INSTEAD and _is_on(f"{block}.{name}", value):
                yield f"{block}.{name}"
    for name, value in (content.get(ZERO) or {}).items():
        if name not in _READ_ZERO and _is_on(name, value):
            yield f"{ZERO}.{name}"


def _is_on(name: str, value: Any) -> bool:
    """Whether a value asks for something that is not done in any case."""
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False
    if name in ("data_types.grad_accum_dtype", "communication_data_type"):
        return value not in (None, "auto", "fp32")
    return value not in (None, "auto", False) and not (name == "gradient_predivide_factor" and value == 1)


def _batch(
    config: Config, facts: Facts, file: DeepSpeedFile, typed: Collection[str] | None = None
) -> list[Problem]:
    """Where the batch numbers of the file are not those of the run (E219)."""
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
