"""`covey train [CONFIG.yaml] --option value ...`, and `covey rlhf`, the same under ms-swift's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from covey.cli.start import start
from covey.config.resolve import Resolved

if TYPE_CHECKING:
    from covey.checks.survey import Survey
    from covey.training.together import Together


def train(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    return start("train", argv, _run)


def rlhf(argv: Sequence[str]) -> int:
    """The same for a command of ms-swift."""
    return start("rlhf", argv, _run)


def _run(resolved: Resolved, surveyed: Survey, others: Together) -> int:
    from covey.training.run import train as run

    return int(run(resolved, surveyed, others).exit_code)
