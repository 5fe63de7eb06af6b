"""Everything that is wrong with a run, all at once, before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from covey.checks.check import Check
from covey.checks.check_list import CHECKS
from covey.checks.deepspeed import deepspeed_problems
from covey.checks.start import is_settled
from covey.config.resolve import Resolved, faulty_options
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.check_filters import filter_problems
from covey.plan.check_layout import layout_problems
from covey.plan.check_memory import memory_problems
from covey.plan.facts import Facts
from covey.plan.kernels import kernel_problems
from covey.plan.shape import COUNTS
from covey.plan.versions import version_problems
from covey.plan.words import sentence
from covey.texts import joined, tr
from covey.types import Problem, Severity


def checks(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return every problem and warning of a configuration under these facts, errors first.

    `typed` are the names of the options that the user gave (`Resolved.typed_names`): a fix of the batch names
    only what has to be typed, and of those that have no effect each is named.
    """
    ordered = sorted([*CHECKS, *_OF_PLAN], key=lambda check: check.place)
    problems = [problem for check in ordered for problem in check.judge(config, facts, typed)]
    return sorted(problems, key=lambda problem: problem.severity is not Severity.ERROR)


def _layout(config: Config, facts: Facts, typed: Collection[str] | None) -> list[Problem]:
    """Return the problems of the layout, and of its memory; one whose parts cannot be together has no
    forecast."""
    problems = [*facts.launch.layout_problems, *layout_problems(config, facts)]
    problems += deepspeed_problems(config, facts, typed)
    if any(problem.severity is Severity.ERROR for problem in problems):
        return problems
    return [*problems, *memory_problems(config, facts, typed)]


_OF_PLAN = (
    Check(place=50, judge=lambda config, facts, _: kernel_problems(config, facts.model, facts.machine)),
    Check(place=70, judge=lambda config, facts, _: version_problems(config, facts)),
    Check(place=190, judge=_layout),
    Check(place=210, judge=lambda config, facts, _: filter_problems(config, facts)),
)
"""Checks of what `covey.plan` computes."""


def refuse_faults(resolved: Resolved, facts: Facts) -> list[Problem]:
    """Return the warnings of a run; ConfigError carries everything that is wrong, warnings included.

    What only follows from a value that nobody could read is left out.
    """
    said = [problem for problem in resolved.problems if not is_settled(problem, facts.lora)]
    faulty = faulty_options(said, resolved.typed_names)
    no_gpus = not facts.layout.num_gpus
    no_batch = no_gpus or bool(faulty & {*COUNTS, "nproc_per_node"})
    # Where a launcher's variables are wrong (E370), the number of processes is not known.
    no_batch = no_batch or any(problem.code == "E370" for problem in said)
    checked = [
        _as_typed(problem, resolved)
        for problem in checks(resolved.config, facts, resolved.typed_names)
        if problem.option not in faulty and not (no_batch and problem.code.startswith("E2"))
    ]
    problems = [*said, *checked]
    if any(problem.severity is Severity.ERROR for problem in problems):
        raise ConfigError(problems)
    return problems


def _as_typed(problem: Problem, resolved: Resolved) -> Problem:
    """Return a problem with the name under which its option was typed, where it is called otherwise here."""
    name = resolved.other_names.get(problem.option)
    if name is None:
        return problem
    also = tr("{option} was given as {name}.", option=problem.option, name=name)
    return replace(problem, seen=joined(" ", [sentence(problem.seen), also]))
