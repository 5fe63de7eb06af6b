"""`covey selftest`: what covey promises to be exact, measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from covey.config.argv import read_words
from covey.options.verbs import SelftestOptions
from covey.texts.language import spoken
from covey.texts.terminal import say


def selftest(argv: Sequence[str]) -> int:
    """Print the table; ConfigError carries what is wrong with the words, GuardStop what failed."""
    options, _ = read_words("selftest", argv, SelftestOptions, most=0)
    from covey.selftest.run import selftest as run

    run(options.device, options.model, _say, ignore_forecast=options.ignore_memory_forecast)
    return 0


def _say(line: str) -> None:
    say(spoken(line))
