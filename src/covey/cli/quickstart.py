"""`covey quickstart`: the flags of `covey train` over the values of the quickstart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from covey.cli.help import asks_for_help, help_text
from covey.cli.launch import launch
from covey.cli.options import read, refuse_faults, under_torchrun
from covey.config.quickstart import QUICKSTART, quickstart_typed


def quickstart(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("quickstart", QUICKSTART))
        return 0
    resolved, num_processes = read(argv, quickstart_typed)
    several = num_processes > 1 and not under_torchrun()
    refuse_faults(resolved, num_processes, with_facts=several)
    if several:
        return launch("quickstart", argv, num_processes, resolved.config.output_dir)
    from covey.train.quickstart import quickstart as run

    return int(run(resolved).exit_code)
