"""The verbs as functions, for notebooks and programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.environment import settle

if TYPE_CHECKING:
    from covey.config.resolve import Resolved
    from covey.training.export import ExportResult
    from covey.training.run import Outcome
    from covey.training.standalone import Evaluated

Functions = dict[str, Callable[..., Any]]


def train(**options: Any) -> Outcome:
    """Train with the options of `covey train`, by the same names; returns where the run ended.

    `reward_funcs` may hold functions beside names. Raises ConfigError with every problem of the options
    before anything is written.
    """
    settle()
    resolved, functions = _resolve(options)
    _refuse_processes(resolved)
    from covey.training.facts import survey
    from covey.training.process import world_size
    from covey.training.run import train as run

    with survey(resolved.config, world_size(), functions=functions) as surveyed:
        return run(resolved, surveyed)


def plan(**options: Any) -> dict[str, Any]:
    """What `covey plan --json` prints for these options, as a dict; reads no weights and asks no network."""
    resolved, functions = _resolve(options)
    from covey.plan.batch import batch_plan
    from covey.plan.checks import refuse_faults
    from covey.plan.report import report_json
    from covey.training.facts import survey

    with survey(resolved.config, 1, offline=True, functions=functions) as surveyed:
        notes = refuse_faults(resolved, surveyed.facts)
        batch = batch_plan(resolved.config, 1, surveyed.facts.num_prompts)
        return report_json(resolved.config, surveyed.facts, batch, notes)


def evaluate(model_or_checkpoint: str | Path, **options: Any) -> Evaluated:
    """What `covey eval` does: sample and score `val_dataset` with a model, or as the checkpoint's run did."""
    settle()
    from covey.config.evaluation import eval_options
    from covey.config.take import take_mapping

    functions: Functions = {}
    layer = take_mapping(_named(options, functions), "argument")
    resolved = eval_options(str(model_or_checkpoint), layer.typed, layer.problems)
    from covey.training.standalone import evaluate_checked

    return evaluate_checked(resolved, Path(model_or_checkpoint), functions)


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    *,
    merge: bool = False,
    base: str | Path | None = None,
) -> ExportResult:
    """What `covey export` does: the model of a checkpoint in a directory of its own, its adapter merged."""
    from covey.checkpoint.manifest import export_target
    from covey.training.export import export as run

    source = Path(checkpoint)
    target = Path(output_dir) if output_dir is not None else export_target(source, merge=merge)
    return run(source, target, merge=merge, base=None if base is None else Path(base))


def _resolve(options: Mapping[str, Any]) -> tuple[Resolved, Functions]:
    from covey.config.resolve import from_dict
    from covey.plan.check_launch import launch_problems, num_ranks

    functions: Functions = {}
    resolved = from_dict(_named(options, functions), num_ranks(os.environ))
    return replace(resolved, problems=(*resolved.problems, *launch_problems(os.environ))), functions


def _refuse_processes(resolved: Resolved) -> None:
    """A function is called in one process; the others are what a launcher starts."""
    from covey.plan.check_launch import num_ranks

    asked = resolved.config.nproc_per_node
    if asked <= num_ranks(os.environ):
        return
    from covey.errors import ConfigError
    from covey.plan.problem import problem
    from covey.types import Fix

    fault = problem(
        "E115",
        "nproc_per_node",
        f"nproc_per_node is {asked}, and this is one process of Python.",
        "The command starts the other processes; a function cannot.",
        Fix(text="`covey train` with the same options, or `torchrun --nproc_per_node N` around the program"),
        Fix(text="one process", edits={"nproc_per_node": 1}),
    )
    raise ConfigError([fault])


def _named(options: Mapping[str, Any], functions: Functions) -> dict[str, Any]:
    """The options with a name for each reward that is given as a function, which goes to `functions`.

    A function that a file holds is named by file, so that config.yaml can be used again.
    """
    from covey.rewards.targets import Target, callable_name, target_of_callable

    named = dict(options)
    given = named.get("reward_funcs")
    if given is None:
        return named
    entries = list(given) if isinstance(given, list | tuple) else [given]
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            continue
        where = target_of_callable(entry)
        by_file = isinstance(where, Target) and where.file is not None
        name = f"{where.file}:{where.name}" if isinstance(where, Target) and by_file else callable_name(entry)
        entries[index] = name
        functions[name] = entry
    named["reward_funcs"] = entries
    return named
