"""`covey train [CONFIG.yaml] --option value ...`, and `covey rlhf`, the same under ms-swift's defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from covey.cli.help import asks_for_help, help_text
from covey.cli.start import start
from covey.config.dialect import ms_swift_typed
from covey.config.resolve import Resolved

if TYPE_CHECKING:
    from covey.training.facts import Survey


def train(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code; ConfigError carries everything that is wrong with the words."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("train"))
        return 0
    return start("train", argv, _run)


def rlhf(argv: Sequence[str]) -> int:
    """The same for a command of ms-swift."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("rlhf", {n: t.value for n, t in ms_swift_typed({}).items()}))
        return 0
    return start("rlhf", argv, _run)


def _run(resolved: Resolved, surveyed: Survey) -> int:
    from covey.training.run import train as run

    return int(run(resolved, surveyed).exit_code)
