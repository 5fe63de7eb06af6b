"""What the verbs that train have in common: words to a checked configuration, to a run in as many processes
as it asks for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from covey.checks.judge import refuse_faults
from covey.checks.launch import asked_machines, processes_here
from covey.checks.rewards.handed import handed
from covey.cli.launch import Start, launch
from covey.cli.options import read, under_torchrun
from covey.config.resolve import Resolved
from covey.options.schema import Config
from covey.plan.ahead import samples_apart
from covey.plan.words import flags

if TYPE_CHECKING:
    from covey.checks.survey import Survey
    from covey.training.together import Together

Run = Callable[[Resolved, "Survey", "Together"], int]


def start_of(config: Config, num_processes: int) -> Start | None:
    """Return what this process starts; None where it is the run itself, or one of its processes."""
    if under_torchrun():
        return None
    if config.launcher == "ray":
        return Start(num_processes=num_processes, output_dir=config.output_dir, launcher="ray")
    if num_processes == 1 and not config.max_restarts:
        return None
    machines, _ = asked_machines(os.environ)
    return Start(
        num_processes=processes_here(os.environ, num_processes),
        output_dir=config.output_dir,
        machines=machines,
        max_restarts=config.max_restarts,
    )


def start(verb: str, argv: Sequence[str], run: Run) -> int:
    """Check the words of a verb and run it; ConfigError carries everything that is wrong with them."""
    # What is wrong is found before torch is imported, which takes seconds; the run gets what was read.
    from covey.training.together import together

    with together(owns_process=True) as others, ExitStack() as stack:
        resolved, num_processes = read(verb, argv)
        from covey.checks.survey import fetch_model, survey

        surveyed = stack.enter_context(survey(resolved.config, num_processes))
        refuse_faults(resolved, surveyed.facts)
        fetch_model(resolved.config)
        if samples_apart(resolved.config):
            from covey.training.sampler import sampler_apart

            surveyed.close()
            named = stack.enter_context(sampler_apart(resolved.config, surveyed.facts))
            argv = [*argv, *shlex.split(flags(named))]
            resolved, _ = read(verb, argv)
            surveyed = stack.enter_context(survey(resolved.config, num_processes))
            refuse_faults(resolved, surveyed.facts)
        start = start_of(resolved.config, num_processes)
        if start is None:
            return run(resolved, surveyed, others)
        surveyed.close()
        return launch(verb, argv, start, handed(resolved.config, surveyed.facts.rewards))
