"""`covey selftest [--device cpu|cuda|auto] [--model DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from covey.config.names import normalise
from covey.errors import ConfigError
from covey.plan.problem import problem
from covey.types import Fix, Problem

_USAGE = """\
usage: covey selftest [--device cpu|cuda|auto] [--model DIR] [--ignore_memory_forecast]

Computes the same things in two ways on this machine and prints how far they are apart, in a table to be
pasted into an issue. Exits with 3 where one is not within its bound. Writes temporary files only; no network.

  --device DEVICE    cpu, cuda or auto. Not given: auto, the GPU where there is one.
  --model DIR        a model of yours, in float32. Not given: a small random one.
  --ignore_memory_forecast
                     start although the forecast says that memory or the disk is too small.
"""
_DEVICES = ("auto", "cpu", "cuda")
_IGNORE = "ignore_memory_forecast"


def selftest(argv: Sequence[str]) -> int:
    """Print the table; ConfigError carries what is wrong with the words, GuardStop what failed."""
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(_USAGE)
        return 0
    flags = _read(argv)
    from covey.selftest.run import selftest as run

    ignore = flags.get(_IGNORE, "false") == "true"
    run(flags.get("device", "auto"), flags.get("model"), _say, ignore_forecast=ignore)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _read(argv: Sequence[str]) -> dict[str, str]:
    """The flags with their values."""
    flags: dict[str, str] = {}
    stray = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        name = normalise(name) if word.startswith("-") else ""
        if name in ("device", "model") and (value or (rest and not rest[0].startswith("-"))):
            flags[name] = value or rest.pop(0)
        elif name == _IGNORE and (value or "true") in ("true", "false"):
            is_said = not value and rest[:1] in (["true"], ["false"])
            flags[name] = rest.pop(0) if is_said else value or "true"
        else:
            stray.append(word)
    problems = [_stray(stray)] if stray else []
    if flags.get("device", "auto") not in _DEVICES:
        problems.append(_no_device(flags["device"]))
    if problems:
        raise ConfigError(problems)
    return flags


def _stray(words: Sequence[str]) -> Problem:
    return problem(
        "E108",
        "selftest",
        f"`{' '.join(words)}` is nothing that `covey selftest` takes.",
        "A flag of another verb, or a value that was left out.",
        Fix(text="`covey selftest`"),
        Fix(text="`covey selftest --device cpu --model DIR`"),
    )


def _no_device(word: str) -> Problem:
    return problem(
        "E104",
        "device",
        f"{word} is no device of `covey selftest`; they are {', '.join(_DEVICES)}.",
        "A misspelt word, or a device that this version does not train on.",
        Fix(text="`covey selftest --device auto`"),
    )
