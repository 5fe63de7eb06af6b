"""What is wrong with the length of the run, its processes, its directory, and what it resumes or replays."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from covey.options.schema import FACTS, Config
from covey.plan.batch import plan_of
from covey.plan.check_objects import SAME_OBJECTS, changed_objects, is_start_alone
from covey.plan.check_start import foreign_resume
from covey.plan.disk import disk_plan, size
from covey.plan.facts import Facts, ResumeFacts, RunOwner
from covey.plan.problem import START_ANYWAY, problem, warning
from covey.plan.shape import counted, faults, shape_of
from covey.types import Fix, Problem

# What a checkpoint has a state of its own for, or none.
_OWN_STATE = ("sync_ref_model", "use_adaptive_entropy")
# What the steps of a rollout are cut by.
_STEP = ("nproc_per_node", "per_device_train_batch_size", "gradient_accumulation_steps")
_CUT = (*_STEP, "num_iterations")


def run_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the machine and the directories say against the configuration."""
    return [
        *_no_step(config, facts),
        *_processes(config, facts),
        *output_dir_problems(config, facts),
        *_resume(config, facts.resume),
        *_replay(config, facts),
        *_disk(config, facts),
        *_switched_off(config),
    ]


def _switched_off(config: Config) -> list[Problem]:
    seen = {
        "guards": "guards is false: steps, rollouts and weights are not checked.",
        "watchdog": "watchdog is false: a run that makes no progress is not ended.",
    }
    on = {name: Fix(text="switch it on again", edits={name: True}) for name in seen}
    return [warning("W153", name, seen[name], "", on[name]) for name in seen if not getattr(config, name)]


def _no_step(config: Config, facts: Facts) -> list[Problem]:
    shape = shape_of(config, facts.num_processes)
    if config.num_train_epochs <= 0 or not facts.num_prompts or faults(shape, facts.num_prompts):
        return []
    plan = plan_of(shape, facts.num_prompts, config.num_train_epochs, config.max_steps)
    if plan.total_steps:
        return [*_long_warmup(config, plan.total_steps), *_no_sync(config, plan.total_steps)]
    return [
        problem(
            "E210",
            "num_train_epochs",
            f"num_train_epochs is {config.num_train_epochs:g} of {counted(facts.num_prompts, 'prompt')}, "
            f"less than one rollout of {counted(plan.prompts_per_rollout, 'prompt')}.",
            "A part of an epoch, to try things out.",
            Fix(text="the steps of one rollout", edits={"max_steps": plan.steps_per_rollout}),
            Fix(text="the whole data once", edits={"num_train_epochs": 1.0}),
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
            f"warmup_steps is {config.warmup_steps} and the run has "
            f"{counted(total_steps, 'optimizer step')}.",
            "A run shortened to try things out.",
            Fix(text="a tenth of the run", edits={"warmup_steps": total_steps // 10}),
        )
    ]


def _no_sync(config: Config, total_steps: int) -> list[Problem]:
    every = config.ref_model_sync_steps
    if not config.sync_ref_model or every < total_steps:
        return []
    fix = Fix(text="a move every fifth of the run", edits={"ref_model_sync_steps": max(1, total_steps // 5)})
    return [
        warning(
            "W124",
            "ref_model_sync_steps",
            f"sync_ref_model is on, the reference moves every {every} optimizer steps, and the run has "
            f"{counted(total_steps, 'optimizer step')}.",
            "The default of 512 steps, in a run shortened to try things out.",
            *((fix,) if total_steps > 1 else ()),
            Fix(text="leave the reference as it is", edits={"sync_ref_model": False}),
        )
    ]


def _processes(config: Config, facts: Facts) -> list[Problem]:
    asked, available = facts.num_processes_here or config.nproc_per_node, facts.nproc_available
    if available is None or asked <= available or facts.cuda is None:
        return []
    if facts.is_rank and facts.cuda and available == 1:
        # A launcher may show each process a GPU of its own; the ranks compare theirs when they meet.
        return []
    fewer = (
        (Fix(text="one process per device", edits={"nproc_per_node": available}),) if available >= 1 else ()
    )
    cause = "A command from a machine with more devices, or CUDA_VISIBLE_DEVICES hides some."
    if facts.cuda:
        shown = counted(available, "GPU")
        seen = f"nproc_per_node is {asked} and this machine shows {shown}."
        if facts.num_processes_here is not None:
            seen = f"{asked} of the run's processes are on this machine, which shows {shown}."
        return [problem("E209", "nproc_per_node", seen, cause, *fewer)]
    seen = f"nproc_per_node is {asked} and this machine has {counted(available, 'core')}, without a GPU."
    return [warning("W101", "nproc_per_node", seen, cause, *fewer)]


def output_dir_problems(config: Config, facts: Facts, words: str = "") -> list[Problem]:
    """Return what stands against writing to output_dir; `words` say why it cannot be, where that is known."""
    path, state = config.output_dir, facts.output_dir_state
    if state == "not_writable":
        return [
            problem(
                "E403",
                "output_dir",
                f"{path} cannot be written{': ' + words if words else ''}.",
                "No permission, or a file where a directory is needed.",
                Fix(text="a directory of your own: --output_dir DIR"),
            )
        ]
    other = Fix(text="another directory", edits={"output_dir": _next_name(path)})
    if facts.owner is not None:
        return [_in_use(path, facts.owner, other)]
    problems = [*_in_the_way(facts), *_damaged_records(facts)]
    if state in (None, "free") or _goes_on(config, facts):
        return problems
    if state == "not_empty":
        return [
            problem(
                "E402",
                "output_dir",
                f"{path} holds files, and no run.",
                "A directory of your own files, or one that another program writes to.",
                other,
            )
        ]
    if config.overwrite_output_dir or (state == "ended" and config.resume_from_checkpoint == "auto"):
        return problems
    goes_on = state == "run"
    return [
        problem(
            "E401",
            "output_dir",
            f"{path} already holds a run{'' if goes_on else ', and no checkpoint to go on from'}.",
            "The same command was started before.",
            *(
                [Fix(text="go on with that run", edits={"resume_from_checkpoint": "latest"})]
                if goes_on
                else []
            ),
            other,
            Fix(text="delete that run", edits={"overwrite_output_dir": True}),
        )
    ]


def _goes_on(config: Config, facts: Facts) -> bool:
    """Whether the run is that of output_dir; what is wrong with its checkpoint is another matter."""
    if facts.resume is None:
        return config.resume_from_checkpoint not in (None, "auto")
    return facts.resume.problem is not None or not facts.resume.is_elsewhere


def _in_use(path: str, owner: RunOwner, other: Fix) -> Problem:
    who = f"process {owner.pid}" if owner.pid else "another process"
    where = f" on {owner.host}" if owner.host else ""
    since = f" since {owner.since}" if owner.since else ""
    sign = "" if owner.is_here else f"; its last sign came {owner.sign_s:.0f} s ago"
    gone = f"if no run is there any more: delete {owner.path} and start again"
    fixes = [Fix(text=f"wait for it, or end it: kill {owner.pid}")] if owner.is_here and owner.pid else []
    return problem(
        "E410",
        "output_dir",
        f"{path} is in use: {who}{where} writes to it{since}{sign}.",
        "",
        other,
        *fixes,
        *([] if owner.is_here else [Fix(text=gone)]),
    )


def _in_the_way(facts: Facts) -> list[Problem]:
    return [
        problem("E412", "output_dir", f"{path} {words}.", "", Fix(text=_move(path, "mine")))
        for path, words in facts.in_the_way
    ]


def _move(path: str, suffix: str) -> str:
    return f"mv {shlex.quote(path)} {shlex.quote(f'{path}.{suffix}')}"


def _damaged_records(facts: Facts) -> list[Problem]:
    if facts.records_problem is None:
        return []
    path, words = facts.records_problem
    fix = Fix(text=_move(path, "damaged"))
    return [problem("E411", "output_dir", f"{path} {words}.", "", fix)]


def _next_name(path: str) -> str:
    """Return the name with its number counted up, or with a first one."""
    plain = os.path.normpath(path)
    numbered = re.fullmatch(r"(.*-)(\d{3,})", plain)
    if numbered is None:
        return f"{plain}-002"
    return f"{numbered[1]}{int(numbered[2]) + 1:0{len(numbered[2])}}"


def _resume(config: Config, resume: ResumeFacts | None) -> list[Problem]:
    if resume is None:
        return []
    if resume.foreign:
        return [foreign_resume(resume)]
    if resume.problem is not None:
        return [_nothing_to_resume(config, resume, resume.problem)]
    passed = [_passed_over(resume, reason) for reason in resume.skipped]
    passed += [] if resume.is_compared else [_not_compared(resume)]
    changed = protected_changes(config, resume.config_changes)
    is_within = _cuts_rollout(config, resume)
    final = (*_OWN_STATE, *(_CUT if is_within else ()))
    is_final = any(name in final for name, _, _ in changed)
    if config.allow_changes:
        changed = tuple(change for change in changed if change[0] in final)
    if not changed:
        return passed
    listed = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed)
    typed = {name: old for name, old, _ in changed if not changed_objects(old)}
    fixes = [Fix(text="as the run was", edits=typed)] if typed else []
    fixes += [SAME_OBJECTS] if len(typed) < len(changed) else []
    cause = "The command was edited, or a default follows another option."
    if is_within:
        cause = _within_words(config, resume)
    elif is_final:
        cause = "The checkpoint has the state of what it was made with, and nothing to start the other from."
    if not is_final:
        fixes.append(Fix(text="go on with the change", edits={"allow_changes": True}))
    seen = f"{resume.path} was made with other options: {listed}."
    return [*passed, problem("E405", "resume_from_checkpoint", seen, cause, *fixes)]


def _cuts_rollout(config: Config, resume: ResumeFacts) -> bool:
    """Whether a rollout that is being trained on would be cut into other steps than before."""
    old = {name: value for name, value, _ in resume.config_changes}
    before, after = _product(config, old, *_STEP)
    return bool(resume.steps_of_rollout) and (before != after or "num_iterations" in old)


def _within_words(config: Config, resume: ResumeFacts) -> str:
    old = {name: value for name, value, _ in resume.config_changes}
    before, after = _product(config, old, *_STEP)
    taken = counted(resume.steps_of_rollout, "step")
    stands = f"The checkpoint was saved inside a rollout, after {taken}"
    if before == after:
        return f"{stands}; num_iterations sets how many steps that rollout has."
    return f"{stands} of {before} completions each; the rest cannot be split into steps of {after}."


def _nothing_to_resume(config: Config, resume: ResumeFacts, words: str) -> Problem:
    weights = Fix(text="start from the weights of a checkpoint: --model CHECKPOINT_DIR")
    auto = Fix(
        text="resume where there is a checkpoint, and start anew where there is none",
        edits={"resume_from_checkpoint": "auto"},
    )
    elsewhere = Fix(
        text="start anew in another directory, and leave this one as it is",
        edits={"output_dir": _next_name(config.output_dir), "resume_from_checkpoint": "auto"},
    )
    return problem(
        "E404",
        "resume_from_checkpoint",
        words if f"{resume.path} " in words else f"{resume.path}: {words}",
        ""
        if resume.skipped
        else "Another directory is meant, the run never saved, or the checkpoint kept its weights only.",
        # With a damaged checkpoint in the directory nothing starts anew there: it may be all that is left.
        elsewhere if resume.skipped else auto,
        weights,
    )


def _not_compared(resume: ResumeFacts) -> Problem:
    path = os.path.join(os.path.dirname(os.path.normpath(resume.path)), "config.yaml")
    seen = f"The options of the stopped run are not known: {path} is missing or cannot be read."
    fix = Fix(text="give the options that the run was started with")
    return warning("W161", "resume_from_checkpoint", seen, "", fix)


def _passed_over(resume: ResumeFacts, reason: str) -> Problem:
    seen = f"{reason}. The run goes on from {resume.path} instead."
    fix = Fix(text="no action is needed: the steps after it are computed again")
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


def _replay(config: Config, facts: Facts) -> list[Problem]:
    if config.replay_rollouts is None or facts.replay_problem is None:
        return []
    joint = " " if facts.replay_problem.startswith(("is ", "holds ", "cannot ")) else ": "
    return [
        problem(
            "E406",
            "replay_rollouts",
            f"{config.replay_rollouts}{joint}{facts.replay_problem}",
            "The rollouts of a run lie in rollouts/ of its output_dir, unless it ran with --rollout_log "
            "none.",
            Fix(text="give the directory with the rollout files: --replay_rollouts RUN/rollouts"),
            Fix(text="sample anew", edits={"replay_rollouts": None}),
        )
    ]


def _disk(config: Config, facts: Facts) -> list[Problem]:
    plan = disk_plan(config, facts)
    free, needed = plan.free_bytes, plan.peak_bytes
    if needed is None or free is None or config.save_total_limit < 1 or needed <= free:
        return []
    ways = (
        ("keep fewer checkpoints", {"save_total_limit": 1}),
        ("save weights only, with nothing to resume from", {"save_only_model": True}),
    )
    fixes = [Fix(text=text, edits=edits) for text, edits in ways if _fits(config, facts, edits)]
    both = {"save_total_limit": 1, "save_only_model": True}
    if not fixes and _fits(config, facts, both):
        fixes.append(Fix(text="both fewer checkpoints and weights only", edits=both))
    seen = (
        f"{counted(plan.num_kept, 'checkpoint')} and the next one take {size(needed)}; {size(free)} are free."
    )
    fixes.append(Fix(text="an output_dir on a larger disk: --output_dir DIR"))
    if config.ignore_memory_forecast:
        return [warning("W150", "save_total_limit", seen, "", *fixes)]
    cause = "A checkpoint that a run can go on from holds the optimizer's state beside the weights."
    return [problem("E407", "save_total_limit", seen, cause, *fixes, START_ANYWAY)]


def _fits(config: Config, facts: Facts, edits: Mapping[str, Any]) -> bool:
    changed = config.model_copy(update=dict(edits))
    peak = disk_plan(changed, facts).peak_bytes
    differs = all(getattr(config, name) != value for name, value in edits.items())
    return differs and peak is not None and peak <= (facts.free_disk_bytes or 0)
