"""`covey train [CONFIG.yaml] --option value ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from covey.cli.help import asks_for_help, help_text
from covey.cli.launch import launch
from covey.cli.options import read, under_torchrun
from covey.plan.checks import refuse_faults


def train(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("train"))
        return 0
    resolved, num_processes = read(argv)
    # What is wrong is found before torch is imported, which takes seconds; the run gets what was read.
    from covey.training.facts import survey

    found = survey(resolved.config, num_processes)
    refuse_faults(resolved, found.facts)
    if num_processes > 1 and not under_torchrun():
        return launch("train", argv, num_processes, resolved.config.output_dir)
    from covey.training.run import train as run

    return int(run(resolved, found).exit_code)
