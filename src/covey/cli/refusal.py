"""The problems of a refused command as JSON: the same object for every verb that has `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.config.argv import split
from covey.config.values import FALSE_WORDS
from covey.errors import ConfigError
from covey.options.declare import Options
from covey.options.schema import Config
from covey.options.verbs import DoctorOptions, MismatchOptions, PlanOptions, ReplayOptions, VerifyOptions
from covey.types import Problem

_DECLARE: Mapping[str, tuple[type[Options], ...]] = {
    "plan": (PlanOptions, Config),
    "doctor": (DoctorOptions,),
    "verify": (VerifyOptions,),
    "mismatch": (MismatchOptions,),
    "replay": (ReplayOptions,),
}


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line has `--json`, even if other parts of it are wrong."""
    verb, *argv = words or ("",)
    if verb not in _DECLARE:
        return False
    flags = [flag for flag in split(argv, *_DECLARE[verb]) if flag.typed and flag.name == "json"]
    return bool(flags) and not FALSE_WORDS & {word.lower() for word in flags[-1].words[:1]}


def as_json(error: ConfigError) -> dict[str, Any]:
    """Return the problems with all their parts, and the results that the verb has in spite of them."""
    return {"exit_code": 2, "problems": [_problem(each) for each in error.problems], **error.beside}


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "code": problem.code,
        "option": problem.option,
        "severity": problem.severity.value,
        "seen": problem.seen,
        "why": problem.why,
        "cause": problem.cause,
        "fixes": [{"text": fix.text, "edits": dict(fix.edits)} for fix in problem.fixes],
    }
