"""From the words of a command to a configuration, or to everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.cli.launch import OUTPUT_DIR
from covey.config import Resolved, Typed, parse, resolve
from covey.errors import ConfigError
from covey.plan import Facts, checks
from covey.plan.shape import COUNTS
from covey.types import Problem, Severity

Base = Callable[[dict[str, Typed]], dict[str, Typed]]
"""What a verb puts under the options that were typed."""


def read(argv: Sequence[str], base: Base = dict) -> tuple[Resolved, int]:
    """Return the configuration of a command and the number of training processes over all machines."""
    parsed = parse(argv)
    typed = base(parsed.typed)
    num_processes = _num_processes(typed)
    resolved = resolve(typed, num_processes, parsed.problems)
    counted_up = os.environ.get(OUTPUT_DIR)
    if counted_up is not None and "output_dir" not in resolved.typed_names:
        config = resolved.config.model_copy(update={"output_dir": counted_up})
        resolved = replace(resolved, config=config)
    return resolved, num_processes


def under_torchrun() -> bool:
    """Return whether this process is one of several that a launcher started."""
    return "WORLD_SIZE" in os.environ


def refuse_faults(resolved: Resolved, num_processes: int, with_facts: bool) -> None:
    """Raise ConfigError with everything that is wrong, warnings included, if anything is.

    Model and data are only looked at where something is wrong already, so that all of it is shown together,
    or `with_facts`: the run gathers the same facts when it starts.
    """
    facts = Facts(num_processes=num_processes)
    found = _problems(resolved, facts)
    if _stops(found) or with_facts:
        found = _with_facts(resolved, num_processes, found)
    if _stops(found):
        raise ConfigError(found)


def _with_facts(resolved: Resolved, num_processes: int, found: list[Problem]) -> list[Problem]:
    if not (resolved.config.model and resolved.config.dataset):
        return found
    from covey.train.facts import gather

    try:
        return _problems(resolved, gather(resolved.config, num_processes))
    except ConfigError as error:
        known = {(problem.code, problem.seen) for problem in found}
        return [*found, *(p for p in error.problems if (p.code, p.seen) not in known)]


def _problems(resolved: Resolved, facts: Facts) -> list[Problem]:
    """Return the problems of the words and of the checks, without those that follow from a value nobody
    could read."""
    faulty = {problem.option for problem in resolved.problems}
    no_batch = bool(faulty & {*COUNTS, "nproc_per_node"})
    checked = [
        problem
        for problem in checks(resolved.config, facts, resolved.typed_names)
        if problem.option not in faulty and not (no_batch and problem.code.startswith("E2"))
    ]
    return [*resolved.problems, *checked]


def _stops(found: Sequence[Problem]) -> bool:
    return any(problem.severity is Severity.ERROR for problem in found)


def _num_processes(typed: dict[str, Typed]) -> int:
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) >= 1:
        return int(world)
    return max(1, typed["nproc_per_node"].value) if "nproc_per_node" in typed else 1
