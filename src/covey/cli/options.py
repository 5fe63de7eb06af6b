"""From the words of a command to a configuration, or to everything that is wrong with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from covey.checks.launch import (
    ASKED_PROCESSES,
    asked_machines,
    asked_processes,
    command_problems,
    is_launched,
    launch_problems,
    num_ranks,
    processes_here,
)
from covey.cli.again import goes_on
from covey.cli.launch import OUTPUT_DIR
from covey.cli.machine import Planned
from covey.config import Resolved, Typed, parse, resolve
from covey.config.argv import take_out
from covey.config.dialect import dialect_note, ms_swift_typed
from covey.config.quickstart import quickstart_typed
from covey.config.take import Layer
from covey.errors import ConfigError
from covey.meeting import earlier_run
from covey.options.schema import REQUIRED, Config
from covey.options.verbs import QuickstartOptions
from covey.plan.layout import GPUS_OF_A_MACHINE
from covey.plan.problem import problem
from covey.texts import Whole, joined, plural, tr
from covey.types import Fix, Problem, Severity

_BASES: Mapping[str, Callable[[dict[str, Typed]], dict[str, Typed]]] = {
    "train": dict,
    "rlhf": ms_swift_typed,
    "quickstart": quickstart_typed,
}
"""What a verb puts under the options that were typed."""


def read(verb: str, argv: Sequence[str], planned: Planned | None = None) -> tuple[Resolved, int]:
    """Return the configuration of a command and the number of training processes over all machines.

    `planned` is a machine that takes the place of this one, with what is wrong with its words.
    """
    own = Layer(QuickstartOptions, verb)
    if verb == "quickstart":
        own, argv = take_out(verb, argv, QuickstartOptions, Config)
    parsed = parse(argv, verb if planned is None else "plan")
    if parsed.is_ms_swift and verb == "train":
        verb = "rlhf"
    if (lacking := _of_stopped_run(parsed.typed, verb if planned is None else "plan", argv)) is not None:
        faults = [p for p in parsed.problems if p.severity is Severity.ERROR]
        raise ConfigError([*faults, lacking])
    typed = _BASES[verb](parsed.typed)
    if "task" in own.typed:
        typed = quickstart_typed(parsed.typed, own.typed["task"].value)
    problems = [*own.problems, *parsed.problems]
    if "nproc_per_node" not in typed:
        asked, faults = asked_processes(os.environ)
        problems += faults
        if asked is not None and asked > 1:
            typed["nproc_per_node"] = Typed(
                asked, tr("environment {asked_processes}", asked_processes=ASKED_PROCESSES)
            )
    if planned is None or planned.machine is None:
        problems += launch_problems(os.environ)
        problems += command_problems(os.environ, {name: of.value for name, of in typed.items()})
    num_processes = _num_processes(typed)
    if planned is not None:
        problems += planned.problems
        if planned.machine is not None and planned.machine.num_gpus:
            problems += _two_numbers(typed, planned.machine.num_gpus)
            num_processes = planned.machine.num_gpus
    notes = [dialect_note(parsed.typed)] if verb == "rlhf" else []
    if planned is None:
        if num_processes > processes_here(os.environ, num_processes):
            typed["nproc_per_node"] = Typed(num_processes, tr("derived from the number of processes"))
        earlier = earlier_run()
        if earlier is not None:
            typed, note = goes_on(typed, earlier)
            notes.append(note)
    resolved = resolve(typed, num_processes, [*problems, *notes])
    counted_up = os.environ.get(OUTPUT_DIR)
    if counted_up is not None and "output_dir" not in resolved.typed_names:
        config = resolved.config.model_copy(update={"output_dir": counted_up})
        resolved = replace(resolved, config=config)
    return resolved, num_processes


def _of_stopped_run(typed: Mapping[str, Typed], verb: str, argv: Sequence[str]) -> Problem | None:
    """Return the problem of a resume without the options of the run, where its config.yaml has them."""
    asked = typed["resume_from_checkpoint"].value if "resume_from_checkpoint" in typed else None
    is_scored = any(n in typed for n in ("reward_model", "environment_factory", "multi_turn_scheduler"))
    lacking = [n for n in REQUIRED if n not in typed and not (n == "reward_funcs" and is_scored)]
    if asked is None or not lacking:
        return None
    is_path = asked not in ("latest", "auto")
    output = str(typed["output_dir"].value) if "output_dir" in typed else ""
    run = output or (os.path.dirname(os.path.normpath(str(asked))) if is_path else "")
    config = os.path.join(run, "config.yaml")
    if not run or not os.path.isfile(config):
        return None
    seen = plural(
        len(lacking), "{names} is not given.", "{names} are not given.", names=joined(", ", lacking)
    )
    cause = tr("{config} holds the options of the stopped run; it is not read by itself.", config=config)
    command = Whole(shlex.join(["covey", verb, config, *argv]))
    return problem("E105", lacking[0], seen, cause, Fix(text=tr("`{command}`", command=command)))


def under_torchrun() -> bool:
    """Return whether this process is one of several that a launcher started."""
    return is_launched(os.environ)


def _num_processes(typed: dict[str, Typed]) -> int:
    if is_launched(os.environ):
        return num_ranks(os.environ)
    here = max(1, typed["nproc_per_node"].value) if "nproc_per_node" in typed else 1
    return here * asked_machines(os.environ)[0].count


def _two_numbers(typed: dict[str, Typed], num_gpus: int) -> list[Problem]:
    """Say where the number of processes is not that of the GPUs that are planned."""
    given = typed.get("nproc_per_node")
    if given is None or given.value == num_gpus:
        return []
    if given.value == GPUS_OF_A_MACHINE and num_gpus % GPUS_OF_A_MACHINE == 0:
        # As it is typed on each of several machines.
        typed["nproc_per_node"] = replace(given, value=num_gpus)
        return []
    seen = tr(
        "plan_gpus is {num_gpus}, but nproc_per_node is {value} ({source}).",
        num_gpus=num_gpus,
        value=given.value,
        source=given.source,
    )
    fix = Fix(text=tr("one process for each GPU"), edits={"nproc_per_node": num_gpus})
    return [problem("E106", "nproc_per_node", seen, "", fix)]
