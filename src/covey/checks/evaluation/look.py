"""The facts that an evaluation without training asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from covey.checks.judge import checks
from covey.checks.objects.look import NO_OBJECTS, Objects
from covey.checks.survey import Survey, survey
from covey.config.adapters import is_adapter
from covey.config.filters import evaluated_alone
from covey.config.resolve import Resolved
from covey.errors import ConfigError
from covey.types import Fix, Problem, Severity

# Batch, output and the speed of training say nothing about an evaluation.
_OF_TRAINING = ("E110", "E2", "E40", "E41", "E387")
# A vLLM over several processes, which an evaluation does not have.
_SPANS = "E214"
# That of the options: the directory of the results cannot be read.
_UNREADABLE_OUTPUT = "E403"


def survey_checked(resolved: Resolved, directory: Path, objects: Objects = NO_OBJECTS) -> Survey:
    """Look at data, rewards and the model or adapter of a directory; ConfigError carries what is wrong with
    them, and closes what was opened."""
    adapter = directory if is_adapter(str(directory)) else None
    found = survey(resolved.config, 1, objects=objects, adapter=adapter)
    problems = [p for p in resolved.problems if _counts(p) or p.code == _UNREADABLE_OUTPUT]
    problems += filter(_counts, checks(evaluated_alone(resolved.config), found.facts))
    faults = [p for p in problems if p.severity is Severity.ERROR]
    if faults:
        found.close()
        raise ConfigError([replace(p, fixes=_for_this_model(p.fixes)) for p in faults])
    return found


def _counts(problem: Problem) -> bool:
    return problem.code == _SPANS or not problem.code.startswith(_OF_TRAINING)


def _for_this_model(fixes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """The fixes without another model, since an evaluation is of the one that is named, and without more
    processes."""
    return tuple(fix for fix in fixes if fix.edits.keys().isdisjoint(("model", "nproc_per_node"))) or fixes
