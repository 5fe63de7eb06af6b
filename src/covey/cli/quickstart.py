"""`covey quickstart`: the flags of `covey train` over the values of the quickstart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from covey.cli.start import start
from covey.config.resolve import Resolved

if TYPE_CHECKING:
    from covey.checks.survey import Survey
    from covey.training.together import Together


def quickstart(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    return start("quickstart", argv, _run)


def _run(resolved: Resolved, surveyed: Survey, others: Together) -> int:
    from covey.training.quickstart import quickstart as run

    return int(run(resolved, surveyed, others).exit_code)
