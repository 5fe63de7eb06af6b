"""Everything that is wrong with a run, all at once, before anything is started."""

from __future__ import annotations

from collections.abc import Collection

from covey.config.schema import Config
from covey.plan.check_batch import batch_problems
from covey.plan.check_inputs import input_problems
from covey.plan.check_run import run_problems
from covey.plan.check_values import value_problems
from covey.plan.facts import Facts
from covey.types import Problem, Severity


def checks(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return every problem and warning of a configuration under these facts, errors first.

    `typed` are the names of the options that the user gave (`Resolved.typed_names`); with them a fix of the
    batch names only what has to be typed.
    """
    problems = [
        *input_problems(config, facts),
        *batch_problems(config, facts.num_processes, facts.num_prompts, typed),
        *value_problems(config),
        *run_problems(config, facts),
    ]
    return sorted(problems, key=lambda problem: problem.severity is not Severity.ERROR)
