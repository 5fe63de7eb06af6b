"""What the verbs that train have in common: words to a checked configuration, to a run in as many processes
as it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from covey.cli.launch import launch
from covey.cli.options import read, under_torchrun
from covey.config.resolve import Resolved
from covey.plan.checks import refuse_faults

if TYPE_CHECKING:
    from covey.training.facts import Survey
    from covey.training.together import Together

Run = Callable[[Resolved, "Survey", "Together"], int]


def start(verb: str, argv: Sequence[str], run: Run) -> int:
    """Check the words of a verb and run it; ConfigError carries everything that is wrong with them."""
    # What is wrong is found before torch is imported, which takes seconds; the run gets what was read.
    from covey.training.together import together

    with together() as others:
        resolved, num_processes = read(verb, argv)
        from covey.training.facts import fetch_model, survey

        with survey(resolved.config, num_processes) as surveyed:
            refuse_faults(resolved, surveyed.facts)
            fetch_model(resolved.config)
            if num_processes > 1 and not under_torchrun():
                surveyed.close()
                return launch(verb, argv, num_processes, resolved.config.output_dir)
            return run(resolved, surveyed, others)
