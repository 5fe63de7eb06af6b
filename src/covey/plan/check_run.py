"""What is wrong with the length of the run, its processes, its directory, and what it resumes or replays."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from covey.config.schema import Config
from covey.plan.batch import plan_of
from covey.plan.disk import disk_plan, size
from covey.plan.facts import Facts, ResumeFacts
from covey.plan.problem import START_ANYWAY, problem, warning
from covey.plan.shape import counted, faults, shape_of
from covey.types import Fix, Problem

FREE_ON_RESUME: frozenset[str] = frozenset(
    {
        "activation_offloading",
        "allow_changes",
        "early_stopping_patience",
        "eval_on_start",
        "eval_steps",
        "eval_strategy",
        "eval_temperature",
        "gradient_checkpointing",
        "greater_is_better",
        "ignore_memory_forecast",
        "keep_trainer_state",
        "load_best_model_at_end",
        "log_completions",
        "logging_steps",
        "max_bad_gold",
        "max_minutes",
        "metric_for_best_model",
        "num_generations_eval",
        "output_dir",
        "overwrite_output_dir",
        "report_to",
        "resume_from_checkpoint",
        "reward_timeout_s",
        "reward_trial",
        "reward_workers",
        "rollout_log",
        "rollout_log_max_gb",
        "run_name",
        "save_only_model",
        "save_steps",
        "save_total_limit",
        "stop_after_steps",
        "unsafe_exec",
        "use_hf",
        "val_dataset",
    }
)
"""Options that alter no sample, gradient or learning rate."""

_LENGTH = frozenset({"max_steps", "num_train_epochs"})
# What a checkpoint has a state of its own for, or none.
_OWN_STATE = ("sync_ref_model", "use_adaptive_entropy")
_SPLIT = frozenset(
    {"nproc_per_node", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
)


def run_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts about the machine and the directories say against the configuration."""
    return [
        *_no_step(config, facts),
        *_processes(config, facts),
        *_output_dir(config, facts),
        *_resume(config, facts.resume),
        *_replay(config, facts),
        *_disk(config, facts),
    ]


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
    wanted, available = config.nproc_per_node, facts.nproc_available
    if available is None or wanted <= available or facts.cuda is None:
        return []
    fewer = (
        (Fix(text="one process per device", edits={"nproc_per_node": available}),) if available >= 1 else ()
    )
    cause = "A command from a machine with more devices, or CUDA_VISIBLE_DEVICES hides some."
    if facts.cuda:
        seen = f"nproc_per_node is {wanted} and this machine shows {counted(available, 'GPU')}."
        return [problem("E209", "nproc_per_node", seen, cause, *fewer)]
    seen = f"nproc_per_node is {wanted} and this machine has {counted(available, 'core')}, without a GPU."
    return [warning("W101", "nproc_per_node", seen, cause, *fewer)]


def _output_dir(config: Config, facts: Facts) -> list[Problem]:
    path, state = config.output_dir, facts.output_dir_state
    if state == "not_writable":
        return [
            problem(
                "E403",
                "output_dir",
                f"{path} cannot be written.",
                "No permission, or a file where a directory is needed.",
                Fix(text="a directory of your own: --output_dir DIR"),
            )
        ]
    if config.resume_from_checkpoint is not None or state in (None, "free"):
        return []
    other = Fix(text="another directory", edits={"output_dir": _next_name(path)})
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
    if config.overwrite_output_dir:
        return []
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
    if resume.problem is not None:
        return [
            problem(
                "E404",
                "resume_from_checkpoint",
                resume.problem if f"{resume.path} " in resume.problem else f"{resume.path}: {resume.problem}",
                "Another directory is meant, the run never saved, or the checkpoint kept its weights only.",
                Fix(
                    text="resume where there is a checkpoint, and start anew where there is none",
                    edits={"resume_from_checkpoint": "auto"},
                ),
                Fix(text="start from the weights of a checkpoint: --model CHECKPOINT_DIR"),
            )
        ]
    changed = protected_changes(config, resume.config_changes)
    is_final = any(name in _OWN_STATE for name, _, _ in changed)
    if config.allow_changes:
        changed = tuple(change for change in changed if change[0] in _OWN_STATE)
    if not changed:
        return []
    listed = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed)
    fixes = [Fix(text="as the run was", edits={name: old for name, old, _ in changed})]
    cause = "The command was edited, or a default follows another option."
    if is_final:
        cause = "The checkpoint has the state of what it was made with, and nothing to start the other from."
    else:
        fixes.append(Fix(text="go on with the change", edits={"allow_changes": True}))
    seen = f"{resume.path} was made with other options: {listed}."
    return [problem("E405", "resume_from_checkpoint", seen, cause, *fixes)]


def protected_changes(
    config: Config, changes: tuple[tuple[str, Any, Any], ...]
) -> tuple[tuple[str, Any, Any], ...]:
    """Return the changes (name, old, new) that a resume refuses without `allow_changes`.

    The length of the run may change while the learning rate does not depend on it, and the split of a step
    into processes and forward passes may while steps and rollouts keep their numbers of completions.
    """
    old = {name: value for name, value, _ in changes}
    free = set(FREE_ON_RESUME)
    if config.lr_scheduler_type in ("constant", "constant_with_warmup") and config.warmup_ratio == 0:
        free |= _LENGTH
    if _same_steps(config, old):
        free |= _SPLIT
    return tuple(change for change in changes if change[0] not in free)


def _same_steps(config: Config, old: Mapping[str, Any]) -> bool:
    def product(*names: str) -> tuple[int, int]:
        before = after = 1
        for name in names:
            before *= old.get(name, getattr(config, name))
            after *= getattr(config, name)
        return before, after

    step = product("nproc_per_node", "per_device_train_batch_size", "gradient_accumulation_steps")
    rollout = product("nproc_per_node", "per_device_train_batch_size", "steps_per_generation")
    return step[0] == step[1] and rollout[0] == rollout[1] and "generation_batch_size" not in old


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
