"""`covey plan [CONFIG.yaml] --option value ...`: what `covey train` would do, without weights and network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.checks.batch import batch_plan
from covey.checks.judge import checks, refuse_faults
from covey.cli.machine import Planned, take_machine
from covey.cli.options import read
from covey.config.resolve import Resolved
from covey.errors import ConfigError
from covey.plan.facts import Facts
from covey.plan.fitting import MOST
from covey.plan.layout import Machine
from covey.plan.memory import memory_plan
from covey.plan.report import report_json, report_lines
from covey.plan.words import note_lines
from covey.plan.works import OF_SERVERS, Works, works
from covey.texts.language import spoken
from covey.texts.terminal import say, say_json
from covey.types import Problem, Severity


def plan(argv: Sequence[str]) -> int:
    """Print the plan as text, or with --json as one object; ConfigError carries what is wrong."""
    planned = take_machine(argv)
    first, *others = planned.words or ("",)
    verb, words = (first, others) if first in ("train", "rlhf") else ("train", planned.words)
    resolved, num_processes = read(verb, words, planned)
    from covey.checks.survey import survey

    machine = _machine(planned, resolved)
    with survey(resolved.config, num_processes, offline=True, machine=machine) as surveyed:
        refusal = None
        try:
            said = refuse_faults(resolved, surveyed.facts)
        except ConfigError as error:
            # What does not fit a machine that is planned is shown before it is refused.
            if not _is_of_layout(error, planned, resolved):
                raise
            refusal, said = error, []
        tried = _works(resolved, surveyed.facts, planned, refusal)
        if tried is not None:
            said = [tried.agreed(problem) for problem in said]
        content = _print(resolved, surveyed.facts, said, planned, tried, is_refused=refusal is not None)
    if refusal is not None:
        problems = refusal.problems if tried is None else [tried.agreed(p) for p in refusal.problems]
        raise ConfigError(problems, beside=content)
    return 0


def _machine(planned: Planned, resolved: Resolved) -> Machine | None:
    """The machine that facts are gathered for: one of which nothing is known where its words stand in a
    file."""
    words = {problem.option for problem in resolved.problems if problem.code == "E212"}
    return Machine(num_gpus=0) if words and planned.machine is None else planned.machine


def _works(resolved: Resolved, facts: Facts, planned: Planned, refusal: ConfigError | None) -> Works | None:
    """Layouts that work on a machine that is planned, where the planned one does not or is a forecast
    alone."""
    memory = memory_plan(resolved.config, facts)
    if planned.machine is None or not memory.phases:
        return None
    if refusal is None and memory.fits:
        return None
    is_ms_swift = any(problem.code == "W113" for problem in resolved.problems)
    return works(resolved.config, facts, resolved.typed_names, "rlhf" if is_ms_swift else "train", checks)


def _print(
    resolved: Resolved,
    facts: Facts,
    said: Sequence[Problem],
    planned: Planned,
    tried: Works | None,
    *,
    is_refused: bool,
) -> Mapping[str, Any]:
    """Print the plan; return what is left to print with the problems of one that is refused."""
    config = resolved.config
    batch = batch_plan(config, facts.launch.num_processes, facts.prompts.num_used)
    if planned.as_json:
        content = report_json(config, facts, batch, said, tried)
        if is_refused:
            return content
        say_json(content)
        return {}
    lines = report_lines(config, facts, batch, works=tried)
    for problem in said:
        # Where no whole command is shown, all changes that fit are.
        is_memory = tried is None and problem.code in ("W114", "W150")
        lines += note_lines(problem, num_fixes=MOST if is_memory else 1)
    say("\n".join(map(spoken, lines)))
    return {}


def _is_of_layout(error: ConfigError, planned: Planned, resolved: Resolved) -> bool:
    """Whether the forecast of a machine that is planned is at fault; beside it options of other tools,
    filters on an engine that does not record what they keep, and servers that do not answer or are not
    named, under which a forecast stands all the same."""
    faults = [problem for problem in error.problems if problem.severity is Severity.ERROR]
    codes = {p.code for p in faults if p.option not in ("async_generate", "max_staleness")}
    if planned.machine is None:
        return not codes
    return codes <= {"E102", "E120", "E211", *OF_SERVERS}
