"""The verbs as functions, for notebooks and programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from covey.environment import settle
from covey.plan.launchers import adopted
from covey.texts import joined, tr
from covey.texts.language import spoken

if TYPE_CHECKING:
    from covey.checks.objects.look import Objects
    from covey.config.resolve import Resolved
    from covey.training.export import ExportResult
    from covey.training.hooks import Hooks
    from covey.training.run import Outcome
    from covey.training.standalone import Evaluated


def train(**options: Any) -> Outcome:
    """Train with the options of `covey train`, by the same names; returns where the run ended.

    Objects may stand in the place of names: functions in `reward_funcs` and as `rollout_func`; a model of
    transformers as `model`, with its `tokenizer`; lists of dicts and data sets of `datasets` as `dataset`
    and `val_dataset`. Such a model is trained itself: it holds the trained weights afterwards. Raises
    ConfigError with every problem of the options before anything is written, and GuardStop where a guard or
    the watchdog ends the run. Ctrl-C raises KeyboardInterrupt and SIGTERM raises SystemExit(143), both after
    a checkpoint is saved; the same call with `resume_from_checkpoint=True` goes on from there. The process
    is never ended from here, unless a launcher has started it as one of several.
    """
    return train_with(options)


def train_with(options: Mapping[str, Any], hooks: Hooks | None = None) -> Outcome:
    """Train as `train` does, and tell `hooks` of the run."""
    settle()
    with _one_voice(), _resolved(options) as (resolved, objects):
        _refuse_processes(resolved)
        from covey.checks.judge import refuse_faults
        from covey.checks.survey import survey
        from covey.plan.ahead import samples_apart
        from covey.training.process import world_size
        from covey.training.run import train as run
        from covey.training.sampler import sampler_apart

        with ExitStack() as stack:
            surveyed = stack.enter_context(survey(resolved.config, world_size(), objects=objects))
            if samples_apart(resolved.config):
                refuse_faults(resolved, surveyed.facts)
                named = stack.enter_context(sampler_apart(resolved.config, surveyed.facts))
                resolved = replace(resolved, config=resolved.config.model_copy(update=named))
                surveyed.close()
                surveyed = stack.enter_context(survey(resolved.config, world_size(), objects=objects))
            outcome = run(resolved, surveyed, hooks=hooks)
    _end_for_signals(outcome)
    return outcome


def plan(**options: Any) -> dict[str, Any]:
    """What `covey plan --json` prints for these options, as a dict; reads no weights and asks no network."""
    from covey.checks.batch import batch_plan
    from covey.checks.judge import refuse_faults
    from covey.checks.survey import survey
    from covey.plan.report import report_json

    with (
        _resolved(options, offline=True) as (resolved, objects),
        survey(resolved.config, 1, offline=True, objects=objects) as surveyed,
    ):
        notes = refuse_faults(resolved, surveyed.facts)
        batch = batch_plan(resolved.config, 1, surveyed.facts.prompts.num_used)
        return report_json(resolved.config, surveyed.facts, batch, notes)


def evaluate(model_or_checkpoint: Any, **options: Any) -> Evaluated:
    """What `covey eval` does: sample and score `val_dataset` with a model, or as the checkpoint's run did.

    Objects may stand beside names as in `train`; a model that is an object is left as it was.
    """
    settle()
    from covey.checks.objects.look import named_objects
    from covey.config.evaluation import eval_options
    from covey.config.take import take_mapping

    given = {**options, "model": model_or_checkpoint}
    with _one_voice(), named_objects(given, offline=False) as (named, objects):
        model = str(named.pop("model"))
        layer = take_mapping(named, "argument")
        resolved = eval_options(model, layer.typed, [*layer.problems, *objects.problems])
        from covey.training.standalone import evaluate_checked

        return evaluate_checked(resolved, Path(model), objects)


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    *,
    merge: bool = False,
    base: str | Path | None = None,
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> ExportResult:
    """What `covey export` does: the model of a checkpoint in a directory of its own, its adapter merged."""
    from covey.checkpoint.manifest import export_target
    from covey.training.export import export as run

    source = Path(checkpoint)
    target = Path(output_dir) if output_dir is not None else export_target(source, merge=merge)
    named = None if base is None else Path(base)
    return run(source, target, merge=merge, base=named, torch_dtype=torch_dtype)


@contextmanager
def _one_voice() -> Iterator[None]:
    """Of the processes of a launcher that all raise an error, one prints it where no program catches it."""
    from covey.checks.launch import launch_problems
    from covey.errors import ConfigError, GuardStop
    from covey.exits import speaks

    try:
        yield
    except (ConfigError, GuardStop) as error:
        if not launch_problems(os.environ) and not speaks(is_of_all=isinstance(error, GuardStop)):
            sys.excepthook = partial(_print_others, error, sys.excepthook)
        raise


def _print_others(said: BaseException, hook: Callable[..., None], kind: Any, error: Any, trace: Any) -> None:
    """Print what ends the program, unless another process has said it."""
    if error is not said:
        hook(kind, error, trace)


def _end_for_signals(outcome: Outcome) -> None:
    """Raise in the program what the signal that has ended the run raises in any program."""
    if outcome.exit_code == 130:
        from covey.errors import CONTINUE

        checkpoint = outcome.output_dir / f"checkpoint-{outcome.step}"
        saved = tr("The run was saved in {checkpoint}.", checkpoint=checkpoint)
        raise KeyboardInterrupt(spoken(joined(" ", [saved, CONTINUE])))
    if outcome.exit_code == 143:
        raise SystemExit(outcome.exit_code)


@contextmanager
def _resolved(options: Mapping[str, Any], *, offline: bool = False) -> Iterator[tuple[Resolved, Objects]]:
    os.environ.update(adopted(os.environ, os.getppid()))
    from covey.checks.launch import launch_problems, num_ranks
    from covey.checks.objects.look import frozen_problems, named_objects
    from covey.config.resolve import from_dict

    with named_objects(options, offline=offline) as (named, objects):
        resolved = from_dict(named, num_ranks(os.environ))
        more = (*launch_problems(os.environ), *objects.problems)
        more += tuple(frozen_problems(resolved.config, objects.model))
        yield replace(resolved, problems=(*resolved.problems, *more)), objects


def _refuse_processes(resolved: Resolved) -> None:
    """A function is called in one process; the others are what a launcher starts."""
    from covey.checks.launch import is_launched, num_ranks

    asked = resolved.config.nproc_per_node
    by_ray = resolved.config.launcher == "ray" and not is_launched(os.environ)
    if asked <= num_ranks(os.environ) and not by_ray:
        return
    option, value, alone = ("launcher", "ray", "torchrun") if by_ray else ("nproc_per_node", asked, 1)
    from covey.errors import ConfigError
    from covey.plan.problem import problem
    from covey.types import Fix

    fault = problem(
        "E115",
        option,
        tr("{option} is {value}, but this is a single Python process.", option=option, value=value),
        tr("The command line starts the other processes; a function call cannot."),
        Fix(
            text=tr(
                "`covey train` with the same options, or `torchrun --nproc_per_node N` around the program"
            )
        ),
        Fix(text=tr("use one process"), edits={option: alone}),
    )
    raise ConfigError([fault])
