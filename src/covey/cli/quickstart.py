"""`covey quickstart`: the flags of `covey train` over the values of the quickstart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from covey.cli.help import asks_for_help, help_text
from covey.cli.launch import launch
from covey.cli.options import read, under_torchrun
from covey.config.quickstart import QUICKSTART, quickstart_typed
from covey.plan.checks import refuse_faults


def quickstart(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("quickstart", QUICKSTART))
        return 0
    resolved, num_processes = read(argv, quickstart_typed)
    # What is wrong is found before torch is imported, which takes seconds; the run gets what was read.
    from covey.training.facts import survey

    found = survey(resolved.config, num_processes)
    refuse_faults(resolved, found.facts)
    if num_processes > 1 and not under_torchrun():
        return launch("quickstart", argv, num_processes, resolved.config.output_dir)
    from covey.training.quickstart import quickstart as run

    return int(run(resolved, found).exit_code)
