"""Finds faults in a batch, in words, with ways out that the same arithmetic has accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from covey.algorithm.loss_types.registry import loss_named
from covey.checks.check import Check
from covey.codes import Code
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.batch import BatchPlan, plan_of
from covey.plan.facts import Facts
from covey.plan.fixes import batch_fixes
from covey.plan.reasons import REFUSED
from covey.plan.shape import COUNTS, Shape, faults, in_range, shape_of
from covey.texts import counted, tr
from covey.types import Fix, Problem

Words = tuple[str, str, str]
"""The option at fault, what was seen, and the likely cause."""


def batch_problems(
    config: Config, num_processes: int, num_prompts: int | None = None, typed: Collection[str] | None = None
) -> list[Problem]:
    """Return everything that is wrong with the arithmetic of a batch, each with fixes that mend all of it.

    `typed` are the names of the options that the user gave; with them a fix names only what has to be typed.
    """
    shape = shape_of(config, num_processes)
    codes = faults(shape, num_prompts)
    if not codes:
        return []
    fixes = batch_fixes(shape, num_prompts, typed)
    problems = []
    for code in codes:
        others = _other_estimator(config, shape, num_prompts) if code == "E201" else ()
        for option, seen, cause in _words(code, shape, num_prompts):
            problems.append(
                Problem(
                    code=code,
                    option=option,
                    seen=seen,
                    why=_WHY[code],
                    cause=cause,
                    fixes=(*fixes, *others),
                )
            )
    return problems


def batch_plan(config: Config, num_processes: int, num_prompts: int | None = None) -> BatchPlan:
    """Return the plan of a configuration's batch; ConfigError says what is wrong with it and what would be
    right."""
    problems = batch_problems(config, num_processes, num_prompts)
    if problems:
        raise ConfigError(problems)
    plan = plan_of(shape_of(config, num_processes), num_prompts, config.num_train_epochs, config.max_steps)
    return replace(plan, on_policy=plan.on_policy and not config.max_staleness)


def _other_estimator(config: Config, shape: Shape, num_prompts: int | None) -> tuple[Fix, ...]:
    """The estimator that compares over the rollout, where nothing else is wrong with the batch and the loss
    does not compare within groups."""
    if loss_named(config.loss_type).by_group or faults(replace(shape, least_group=1), num_prompts):
        return ()
    edits = {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "batch"}
    return (Fix(text=tr("use one completion per prompt and compare it with the whole rollout"), edits=edits),)


def _words(code: str, shape: Shape, num_prompts: int | None) -> list[Words]:
    if code == "E207":
        return [_too_few_prompts(shape, num_prompts or 0)]
    if code == "E208":
        return _out_of_range(shape)
    return [_ONE[code](shape)]


def _out_of_range(shape: Shape) -> list[Words]:
    wrong = [name for name in COUNTS if not in_range(getattr(shape, name))]
    own = [name for name in wrong if not _follows(name, shape)]
    cause = tr("The value may mean `not set` in another tool.")
    values = {name: getattr(shape, name) for name in own or wrong}
    return [
        (name, tr("{name} is {value}.", name=name, value=value), cause if value <= 0 else "")
        for name, value in values.items()
    ]


def _follows(name: str, shape: Shape) -> bool:
    """Return whether a count is out of range only because another one is."""
    if name == "steps_per_generation":
        return shape.steps_per_generation == shape.gradient_accumulation_steps
    return name == "generation_batch_size" and shape.generation_batch_size == shape.completions_per_rollout


def _group_too_small(shape: Shape) -> Words:
    return (
        "num_generations",
        tr(
            "num_generations is {num_generations}, so a prompt has no second completion to compare with.",
            num_generations=shape.num_generations,
        ),
        tr("It may have been lowered to save memory; memory depends on per_device_train_batch_size instead."),
    )


def _product(shape: Shape) -> str:
    return tr(
        "{processes} x per_device_train_batch_size {per_device_train_batch_size} x "
        "steps_per_generation {steps_per_generation} = {completions} per rollout",
        processes=counted(shape.num_processes, "process"),
        per_device_train_batch_size=shape.per_device_train_batch_size,
        steps_per_generation=shape.steps_per_generation,
        completions=counted(shape.completions_per_rollout, "completion"),
    )


def _groups_do_not_fit(shape: Shape) -> Words:
    return (
        "num_generations",
        tr(
            "{product}, which is not a multiple of num_generations {num_generations}.",
            product=_product(shape),
            num_generations=shape.num_generations,
        ),
        tr("Batch sizes count completions here, not prompts.")
        if shape.completions_per_rollout < shape.num_generations
        else tr(
            "The sizes share no factor (such as a batch of 3 and groups of 4), or the command was "
            "written for another number of processes."
        ),
    )


def _sizes_disagree(shape: Shape) -> Words:
    return (
        "generation_batch_size",
        tr(
            "{product}, but generation_batch_size is {generation_batch_size}.",
            product=_product(shape),
            generation_batch_size=shape.generation_batch_size,
        ),
        tr(
            "steps_per_generation and generation_batch_size are both given; one is enough. Or the "
            "configuration file comes from a run with another number of processes."
        ),
    )


def _size_not_divisible(shape: Shape) -> Words:
    return (
        "generation_batch_size",
        tr(
            "generation_batch_size is {generation_batch_size}, which is not a multiple of "
            "{processes} x per_device_train_batch_size {per_device_train_batch_size} = "
            "{num_processes}.",
            generation_batch_size=shape.generation_batch_size,
            processes=counted(shape.num_processes, "process"),
            per_device_train_batch_size=shape.per_device_train_batch_size,
            num_processes=shape.num_processes * shape.per_device_train_batch_size,
        ),
        "",
    )


def _step_straddles(shape: Shape) -> Words:
    return (
        "steps_per_generation",
        tr(
            "steps_per_generation is {steps_per_generation}, which is not a multiple of "
            "gradient_accumulation_steps {gradient_accumulation_steps}.",
            steps_per_generation=shape.steps_per_generation,
            gradient_accumulation_steps=shape.gradient_accumulation_steps,
        ),
        tr("If the two are equal, training is on-policy."),
    )


def _step_longer(shape: Shape) -> Words:
    return (
        "steps_per_generation",
        tr(
            "steps_per_generation {steps_per_generation} is below gradient_accumulation_steps "
            "{gradient_accumulation_steps}: one optimizer step would need {rollouts:.4g} rollouts.",
            steps_per_generation=shape.steps_per_generation,
            gradient_accumulation_steps=shape.gradient_accumulation_steps,
            rollouts=shape.gradient_accumulation_steps / shape.steps_per_generation,
        ),
        tr(
            "With steps_per_generation equal to gradient_accumulation_steps the run is the same, "
            "because nothing is updated in between."
        ),
    )


def _too_few_prompts(shape: Shape, num_prompts: int) -> Words:
    needed = shape.completions_per_rollout // shape.num_generations
    return (
        "dataset",
        tr(
            "The dataset has {prompts}, but one rollout needs {needed} ({completions_per_rollout} "
            "completions / num_generations {num_generations}).",
            prompts=counted(num_prompts, "usable prompt"),
            needed=needed,
            completions_per_rollout=shape.completions_per_rollout,
            num_generations=shape.num_generations,
        ),
        tr("A rollout has processes x per_device_train_batch_size x steps_per_generation completions."),
    )


_ONE: dict[str, Callable[[Shape], Words]] = {
    "E201": _group_too_small,
    "E202": _groups_do_not_fit,
    "E203": _sizes_disagree,
    "E204": _size_not_divisible,
    "E205": _step_straddles,
    "E206": _step_longer,
}


_CODES = (
    Code(
        code="E201",
        title="Group of fewer than two completions",
        why="The advantage of a completion compares its reward with those of the other completions of "
        "the same prompt. With one completion there is nothing to compare, every advantage is 0 and "
        "no weight changes.",
    ),
    Code(
        code="E202",
        title="Rollout that does not hold whole groups",
        why="A rollout contains whole groups only: processes x per_device_train_batch_size x "
        "steps_per_generation must be a multiple of num_generations. A group may span processes and "
        "forward passes.",
    ),
    Code(
        code="E203",
        title="steps_per_generation and generation_batch_size disagree",
        why="Both options set the size of a rollout, but to different values.",
    ),
    Code(
        code="E204",
        title="generation_batch_size is not a multiple of a forward pass of all processes",
        why="Each process takes the same number of full forward passes per rollout, so "
        "generation_batch_size must be a multiple of processes x per_device_train_batch_size.",
    ),
    Code(
        code="E205",
        title="Optimizer step that uses two rollouts",
        why="If steps_per_generation is not a multiple of gradient_accumulation_steps, some steps mix "
        "samples from two versions of the policy.",
    ),
    Code(
        code="E206",
        title="More than one rollout per optimizer step",
        why="No weight is updated between these rollouts, so together they are one larger rollout. With "
        "num_iterations above 1, the additional passes would only repeat the same gradient.",
    ),
    Code(
        code="E207",
        title="Data set smaller than one rollout",
        why="A rollout takes a fixed number of different prompts. If the data set has fewer, the run "
        "would end at once without a single step.",
    ),
    Code(
        code="E208",
        title="Batch count out of range",
        why="Every count of the batch must be a whole number from 1 to 1,000,000,000.",
    ),
)
_WHY = {code.code: code.why for code in _CODES}


def _of_run(config: Config, facts: Facts, typed: Collection[str] | None) -> list[Problem]:
    # How many prompts there are once rows that have to be corrected are corrected nobody knows.
    is_known = not any(left_out.reason in REFUSED for left_out in facts.data.left_out)
    num_prompts = facts.prompts.num_used if is_known else None
    return batch_problems(config, facts.launch.num_processes, num_prompts, typed)


CHECK = Check(place=180, judge=_of_run, codes=_CODES)
