"""Finds faults in the length of the run, its processes, its directory, and what it resumes or replays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from covey.checks.check import Check
from covey.checks.objects.judge import (
    SAME_OBJECTS,
    changed_functions,
    changed_objects,
    is_start_alone,
    same_functions,
)
from covey.checks.output.judge import next_name, output_dir_problems
from covey.checks.run.codes import CODES
from covey.checks.start import foreign_resume
from covey.options.schema import FACTS, Config
from covey.plan.batch import plan_of
from covey.plan.disk import disk_plan, size
from covey.plan.facts import (
    Facts,
    LaunchFacts,
    MachineFacts,
    OutputFacts,
    PromptFacts,
    ResumeFacts,
    RewardFacts,
)
from covey.plan.problem import START_ANYWAY, problem, warning
from covey.plan.shape import faults, shape_of
from covey.texts import counted, has_value, joined, tr
from covey.types import Fix, Problem

# What a checkpoint has a state of its own for, or none.
_OWN_STATE = ("sync_ref_model", "use_adaptive_entropy")
# What the steps of a rollout are cut by.
_STEP = ("nproc_per_node", "per_device_train_batch_size", "gradient_accumulation_steps")
_CUT = (*_STEP, "num_iterations")


def run_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the machine and the directories say against the configuration."""
    return [
        *_no_step(config, facts.prompts, facts.launch),
        *_processes(config, facts.launch, facts.machine),
        *output_dir_problems(config, facts.output),
        *_resume(config, facts.output.resume, facts.rewards.available),
        *_changed_rewards(facts.rewards, facts.output),
        *_replay(config, facts.output),
        *_disk(config, facts),
        *_switched_off(config),
    ]


def _switched_off(config: Config) -> list[Problem]:
    seen = {
        "guards": tr("guards is false: steps, rollouts and weights are not checked."),
        "watchdog": tr("watchdog is false: a run that makes no progress is not ended."),
    }
    on = {name: Fix(text=tr("switch it on again"), edits={name: True}) for name in seen}
    return [warning("W153", name, seen[name], "", on[name]) for name in seen if not getattr(config, name)]


def _no_step(config: Config, prompts: PromptFacts, launch: LaunchFacts) -> list[Problem]:
    shape = shape_of(config, launch.num_processes)
    if config.num_train_epochs <= 0 or not prompts.num_used or faults(shape, prompts.num_used):
        return []
    plan = plan_of(shape, prompts.num_used, config.num_train_epochs, config.max_steps)
    if plan.total_steps:
        return [*_long_warmup(config, plan.total_steps), *_no_sync(config, plan.total_steps)]
    return [
        problem(
            "E210",
            "num_train_epochs",
            tr(
                "num_train_epochs {num_train_epochs:g} of {prompts} is less than one rollout, "
                "which takes {needed}.",
                num_train_epochs=config.num_train_epochs,
                prompts=counted(prompts.num_used, "prompt"),
                needed=counted(plan.prompts_per_rollout, "prompt"),
            ),
            "",
            Fix(text=tr("train for the steps of one rollout"), edits={"max_steps": plan.steps_per_rollout}),
            Fix(text=tr("use all rows once"), edits={"num_train_epochs": 1.0}),
        )
    ]


def _long_warmup(config: Config, total_steps: int) -> list[Problem]:
    if (
        config.lr_scheduler_type == "constant"
        or config.warmup_steps < total_steps
        or config.warmup_steps == 0
    ):
        return []
    return [
        warning(
            "W107",
            "warmup_steps",
            tr(
                "warmup_steps is {warmup_steps}, but the run has only {steps}.",
                warmup_steps=config.warmup_steps,
                steps=counted(total_steps, "optimizer step"),
            ),
            "",
            Fix(text=tr("warm up for a tenth of the run"), edits={"warmup_steps": total_steps // 10}),
        )
    ]


def _no_sync(config: Config, total_steps: int) -> list[Problem]:
    every = config.ref_model_sync_steps
    if not config.sync_ref_model or every < total_steps:
        return []
    fix = Fix(
        text=tr("update the reference every fifth of the run"),
        edits={"ref_model_sync_steps": max(1, total_steps // 5)},
    )
    return [
        warning(
            "W124",
            "ref_model_sync_steps",
            tr(
                "sync_ref_model updates the reference every {every} optimizer steps, but the run "
                "has only {steps}.",
                every=every,
                steps=counted(total_steps, "optimizer step"),
            ),
            tr("The default is 512 steps."),
            *((fix,) if total_steps > 1 else ()),
            Fix(text=tr("keep the reference model fixed"), edits={"sync_ref_model": False}),
        )
    ]


def _processes(config: Config, launch: LaunchFacts, machine: MachineFacts) -> list[Problem]:
    asked, available = launch.num_processes_here or config.nproc_per_node, machine.nproc_available
    if available is None or asked <= available or machine.cuda is None:
        return []
    if launch.is_rank and machine.cuda and available == 1:
        # A launcher may show each process a GPU of its own; the ranks compare theirs when they meet.
        return []
    fewer = (
        (Fix(text=tr("use one process per device"), edits={"nproc_per_node": available}),)
        if available >= 1
        else ()
    )
    cause = tr("The command was written for a machine with more devices, or CUDA_VISIBLE_DEVICES hides some.")
    if machine.cuda:
        shown = counted(available, "GPU")
        seen = tr("nproc_per_node is {asked}, but this machine has {shown}.", asked=asked, shown=shown)
        if launch.num_processes_here is not None:
            seen = tr(
                "The run has {asked} processes on this machine, but only {shown} are visible.",
                asked=asked,
                shown=shown,
            )
        return [problem("E209", "nproc_per_node", seen, cause, *fewer)]
    seen = tr(
        "nproc_per_node is {asked}, but this machine has {cores} and no GPU.",
        asked=asked,
        cores=counted(available, "core"),
    )
    return [warning("W101", "nproc_per_node", seen, cause, *fewer)]


def _resume(
    config: Config, resume: ResumeFacts | None, rewards: Sequence[str] | None = None
) -> list[Problem]:
    if resume is None:
        return []
    if resume.foreign:
        return [foreign_resume(resume)]
    if resume.problem is not None:
        return [_nothing_to_resume(config, resume, resume.problem)]
    passed = [_passed_over(resume, reason) for reason in resume.skipped]
    passed += [] if resume.is_compared else [_not_compared(resume)]
    passed += [_lost(resume)] if resume.lost else []
    changed = protected_changes(config, resume.config_changes)
    is_within = _cuts_rollout(config, resume)
    final = (*_OWN_STATE, *(_CUT if is_within else ()))
    is_final = any(name in final for name, _, _ in changed)
    if config.allow_changes:
        changed = tuple(change for change in changed if change[0] in final)
    if not changed:
        return passed
    listed = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed)
    functions = changed_functions(config, changed, rewards)
    typed = {
        name: old
        for name, old, _ in changed
        if not changed_objects(old) and not (functions and name == "reward_funcs")
    }
    fixes = [Fix(text=tr("use the former values"), edits=typed)] if typed else []
    fixes += [same_functions(functions)] if functions else []
    fixes += [SAME_OBJECTS] if len(typed) + bool(functions) < len(changed) else []
    cause = ""
    if is_within:
        cause = _within_words(config, resume)
    elif all(FACTS[name].resume == "length" for name, _, _ in changed):
        cause = tr(
            "With lr_scheduler_type {schedule} and warmup_ratio {ratio:g} the learning rate of each step "
            "depends on the length of the run.",
            schedule=config.lr_scheduler_type,
            ratio=config.warmup_ratio,
        )
    elif is_final:
        cause = tr("The checkpoint holds state only for the options it was saved with.")
    if not is_final:
        fixes.append(Fix(text=tr("continue with the change"), edits={"allow_changes": True}))
    seen = tr("{path} was saved with other options: {listed}.", path=resume.path, listed=listed)
    return [*passed, problem("E405", "resume_from_checkpoint", seen, cause, *fixes)]


def _changed_rewards(rewards: RewardFacts, output: OutputFacts) -> list[Problem]:
    """A warning where the code of a reward function is not what the stopped run had."""
    before = dict(output.resume.reward_texts) if output.resume is not None else {}
    changed = [name for name, text in rewards.texts if before.get(name, text) != text]
    if not changed:
        return []
    assert output.resume is not None
    seen = tr(
        "The code of {names} has changed since {path} was saved.",
        names=joined(", ", changed),
        path=output.resume.path,
    )
    fix = Fix(text=tr("no action is needed if you changed it on purpose"))
    return [warning("W163", "reward_funcs", seen, "", fix)]


def _cuts_rollout(config: Config, resume: ResumeFacts) -> bool:
    """Whether a rollout that is being trained on would be cut into other steps than before."""
    old = {name: value for name, value, _ in resume.config_changes}
    before, after = _product(config, old, *_STEP)
    return bool(resume.steps_of_rollout) and (before != after or "num_iterations" in old)


def _within_words(config: Config, resume: ResumeFacts) -> str:
    old = {name: value for name, value, _ in resume.config_changes}
    before, after = _product(config, old, *_STEP)
    taken = counted(resume.steps_of_rollout, "step")
    stands = tr("The checkpoint was saved in the middle of a rollout, after {taken}", taken=taken)
    if before == after:
        return tr(
            "{stands}; changing num_iterations would change how many steps that rollout has.", stands=stands
        )
    return tr(
        "{stands} of {before} completions each; the remaining completions cannot be split into "
        "steps of {after}.",
        stands=stands,
        before=before,
        after=after,
    )


def _nothing_to_resume(config: Config, resume: ResumeFacts, words: str) -> Problem:
    weights = Fix(text=tr("start from the weights of a checkpoint: --model CHECKPOINT_DIR"))
    auto = Fix(
        text=tr("resume if there is a checkpoint, and start from the beginning if there is none"),
        edits={"resume_from_checkpoint": "auto"},
    )
    elsewhere = Fix(
        text=tr("start a new run in another directory, and leave this one unchanged"),
        edits={"output_dir": next_name(config.output_dir), "resume_from_checkpoint": "auto"},
    )
    newest = Fix(
        text=tr("resume from the newest checkpoint there"), edits={"resume_from_checkpoint": resume.newest}
    )
    return problem(
        "E404",
        "resume_from_checkpoint",
        words if has_value(words, resume.path) else tr("{path}: {words}", path=resume.path, words=words),
        ""
        if resume.skipped
        else tr("The directory is the wrong one, the run never saved, or the checkpoint has only weights."),
        # With a damaged checkpoint in the directory nothing starts anew there: it may be all that is left.
        *([newest] if resume.newest else []),
        elsewhere if resume.skipped else auto,
        weights,
    )


def _not_compared(resume: ResumeFacts) -> Problem:
    path = os.path.join(os.path.dirname(os.path.normpath(resume.path)), "config.yaml")
    seen = tr("The options of the stopped run are not known: {path} is missing or cannot be read.", path=path)
    fix = Fix(text=tr("give the options that the run was started with"))
    return warning("W161", "resume_from_checkpoint", seen, "", fix)


def _lost(resume: ResumeFacts) -> Problem:
    fix = Fix(
        text=tr("if you have a copy, put it back before you resume the run; otherwise there is nothing to do")
    )
    return warning("W164", "resume_from_checkpoint", tr("{lost}.", lost=joined("; ", resume.lost)), "", fix)


def _passed_over(resume: ResumeFacts, reason: str) -> Problem:
    seen = tr("{reason}. The run continues from {path} instead.", reason=reason, path=resume.path)
    fix = Fix(text=tr("no action is needed: the steps after that checkpoint are computed again"))
    return warning("W160", "resume_from_checkpoint", seen, "", fix)


def protected_changes(
    config: Config, changes: tuple[tuple[str, Any, Any], ...]
) -> tuple[tuple[str, Any, Any], ...]:
    """Return the changes (name, old, new) that a resume refuses without `allow_changes`.

    The length of the run may change while the learning rate does not depend on it, and the split of a step
    into processes and forward passes may while steps and rollouts keep their numbers of completions.
    """
    old = {name: value for name, value, _ in changes}
    may_change = {"free"}
    if config.lr_scheduler_type in ("constant", "constant_with_warmup") and config.warmup_ratio == 0:
        may_change.add("length")
    if _same_steps(config, old):
        may_change.add("split")
    return tuple(c for c in changes if FACTS[c[0]].resume not in may_change and not is_start_alone(config, c))


def _same_steps(config: Config, old: Mapping[str, Any]) -> bool:
    step = _product(config, old, *_STEP)
    rollout = _product(config, old, "nproc_per_node", "per_device_train_batch_size", "steps_per_generation")
    return step[0] == step[1] and rollout[0] == rollout[1] and "generation_batch_size" not in old


def _product(config: Config, old: Mapping[str, Any], *names: str) -> tuple[int, int]:
    """The product of options as they were and as they are."""
    before = after = 1
    for name in names:
        before *= old.get(name, getattr(config, name))
        after *= getattr(config, name)
    return before, after


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _replay(config: Config, output: OutputFacts) -> list[Problem]:
    if config.replay_rollouts is None or output.replay_problem is None:
        return []
    return [
        problem(
            "E406",
            "replay_rollouts",
            output.replay_problem,
            "",
            Fix(
                text=tr(
                    "give the complete rollouts/ of a run that did not have --rollout_log none: "
                    "--replay_rollouts RUN/rollouts"
                )
            ),
            Fix(text=tr("sample new completions"), edits={"replay_rollouts": None}),
        )
    ]


def _disk(config: Config, facts: Facts) -> list[Problem]:
    plan = disk_plan(config, facts)
    free, needed = plan.free_bytes, plan.peak_bytes
    if needed is None or free is None or config.save_total_limit < 1 or needed <= free:
        return []
    if facts.output.state == "not_writable":
        return []  # What is free where nothing can be written says nothing.
    ways = (
        (tr("keep fewer checkpoints"), {"save_total_limit": 1}),
        (tr("save only weights; the run cannot be resumed then"), {"save_only_model": True}),
    )
    fixes = [Fix(text=text, edits=edits) for text, edits in ways if _fits(config, facts, edits)]
    both = {"save_total_limit": 1, "save_only_model": True}
    if not fixes and _fits(config, facts, both):
        fixes.append(Fix(text=tr("keep fewer checkpoints and save only weights"), edits=both))
    seen = tr(
        "{checkpoints} and the next one take {size}, but only {free} are free.",
        checkpoints=counted(plan.num_kept, "checkpoint"),
        size=size(needed),
        free=size(free),
    )
    fixes.append(Fix(text=tr("use an output_dir on a larger disk: --output_dir DIR")))
    if config.ignore_memory_forecast:
        return [warning("W150", "save_total_limit", seen, "", *fixes)]
    cause = tr("A checkpoint that a run can resume from holds the optimizer state as well as the weights.")
    return [problem("E407", "save_total_limit", seen, cause, *fixes, START_ANYWAY)]


def _fits(config: Config, facts: Facts, edits: Mapping[str, Any]) -> bool:
    changed = config.model_copy(update=dict(edits))
    peak = disk_plan(changed, facts).peak_bytes
    differs = all(getattr(config, name) != value for name, value in edits.items())
    return differs and peak is not None and peak <= (facts.output.free_bytes or 0)


CHECK = Check(place=240, judge=lambda config, facts, _: run_problems(config, facts), codes=CODES)
