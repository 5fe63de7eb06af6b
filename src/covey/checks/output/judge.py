"""Finds faults in the directory of a run: it is used, holds another run, or cannot be written."""

from __future__ import annotations

import os
import re
import shlex

from covey.options.schema import Config
from covey.plan.facts import OutputFacts, RunOwner
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

# What a checkpoint has a state of its own for, or none.
_OWN_STATE = ("sync_ref_model", "use_adaptive_entropy")
# What the steps of a rollout are cut by.
_STEP = ("nproc_per_node", "per_device_train_batch_size", "gradient_accumulation_steps")
_CUT = (*_STEP, "num_iterations")


def output_dir_problems(config: Config, output: OutputFacts, words: str = "") -> list[Problem]:
    """Return what stands against writing to output_dir; `words` say why it cannot be, where that is known."""
    path, state = config.output_dir, output.state
    known = words or output.fault
    if state == "not_writable":
        return [unwritable_problem(path, known)]
    other = Fix(text=tr("use another directory"), edits={"output_dir": next_name(path)})
    if output.owner is not None:
        return [_in_use(path, output.owner, other)]
    problems = [*_in_the_way(output), *_damaged_records(output)]
    if state in (None, "free") or _goes_on(config, output):
        return problems
    if state == "not_empty" and config.overwrite_output_dir != "aside":
        return [
            problem(
                "E402",
                "output_dir",
                tr("{path} contains files that are not of a covey run.", path=path),
                "",
                other,
            )
        ]
    if config.overwrite_output_dir != "false" and _is_inside(config.model, path):
        seen = tr(
            "model is {model}, a checkpoint of the run that {path} holds.", model=config.model, path=path
        )
        return [problem("E401", "output_dir", seen, tr("overwrite_output_dir would take it away."), other)]
    if config.overwrite_output_dir != "false" or (
        state == "ended" and config.resume_from_checkpoint == "auto"
    ):
        return problems
    goes_on = state == "run"
    return [
        problem(
            "E401",
            "output_dir",
            tr(
                "{path} already holds a run{value}.",
                path=path,
                value="" if goes_on else tr(", but no checkpoint to resume from"),
            ),
            tr("The same command was started before."),
            *(
                [Fix(text=tr("resume that run"), edits={"resume_from_checkpoint": "latest"})]
                if goes_on
                else []
            ),
            other,
            Fix(text=tr("delete that run"), edits={"overwrite_output_dir": "true"}),
        )
    ]


def _is_inside(model: str, directory: str) -> bool:
    """Whether a model is a directory below another one."""
    return os.path.isdir(model) and os.path.abspath(model).startswith(os.path.abspath(directory) + os.sep)


def unwritable_problem(path: str, known: str) -> Problem:
    """Return what is said of a directory that cannot be written; `known` says why, or is ""."""
    return problem(
        "E403",
        "output_dir",
        tr("{path} cannot be written: {words}.", path=path, words=known)
        if known
        else tr("{path} cannot be written.", path=path),
        "" if known else tr("There is no write permission, or a file is where a directory is needed."),
        Fix(text=tr("use a directory of your own: --output_dir DIR")),
    )


def _goes_on(config: Config, output: OutputFacts) -> bool:
    """Whether the run is that of output_dir; what is wrong with its checkpoint is another matter."""
    if output.resume is None:
        return config.resume_from_checkpoint not in (None, "auto")
    return output.resume.problem is not None or not output.resume.is_elsewhere


def _in_use(path: str, owner: RunOwner, other: Fix) -> Problem:
    who = tr("process {pid}", pid=owner.pid) if owner.pid else tr("another process")
    where = tr(" on {host}", host=owner.host) if owner.host else ""
    since = tr(" since {since}", since=owner.since) if owner.since else ""
    sign = "" if owner.is_here else tr("; its last heartbeat was {sign_s:.0f} s ago", sign_s=owner.sign_s)
    gone = tr("if that run has ended: delete {path} and start again", path=owner.path)
    fixes = (
        [Fix(text=tr("wait for it, or stop it: kill {pid}", pid=owner.pid))]
        if owner.is_here and owner.pid
        else []
    )
    return problem(
        "E410",
        "output_dir",
        tr(
            "{path} is in use: {who}{where} has been writing to it{since}{sign}.",
            path=path,
            who=who,
            where=where,
            since=since,
            sign=sign,
        ),
        "",
        other,
        *fixes,
        *([] if owner.is_here else [Fix(text=gone)]),
    )


def _in_the_way(output: OutputFacts) -> list[Problem]:
    return [
        problem(
            "E412",
            "output_dir",
            tr("{path} {words}.", path=path, words=words),
            "",
            Fix(text=_move(path, "mine")),
        )
        for path, words in output.in_the_way
    ]


def _move(path: str, suffix: str) -> str:
    return f"mv {shlex.quote(path)} {shlex.quote(f'{path}.{suffix}')}"


def _damaged_records(output: OutputFacts) -> list[Problem]:
    if output.records_problem is None:
        return []
    path, words = output.records_problem
    fix = Fix(text=_move(path, "damaged"))
    return [problem("E411", "output_dir", tr("{path} {words}.", path=path, words=words), "", fix)]


def next_name(path: str) -> str:
    """Return the name with its number counted up, or with a first one."""
    plain = os.path.normpath(path)
    numbered = re.fullmatch(r"(.*-)(\d{3,})", plain)
    if numbered is None:
        return f"{plain}-002"
    return f"{numbered[1]}{int(numbered[2]) + 1:0{len(numbered[2])}}"
