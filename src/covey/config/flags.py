"""The command line: `covey train [CONFIG.yaml] --option value ...`.

Flags are spelled with dashes or underscores, in any case. A list takes several words, a repeated flag
replaces, a switch is `--x`, `--x true`, `--x false` or `--no_x`, and `--x=value` works everywhere. What is
wrong becomes a problem, so that all of it is shown together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.config.file import read_file
from covey.config.layers import merge
from covey.config.names import SWITCHES, look_up, normalise
from covey.config.take import Layer, Typed, stray
from covey.config.values import kind_of
from covey.types import Problem

__all__ = ["Parsed", "Typed", "parse"]

# What an option means that stands without a value.
_ALONE = {
    "resume_from_checkpoint": "latest",
    "log_completions": "true",
    "gradient_checkpointing": "true",
    "use_liger_kernel": "true",
}

# A word such as -1 or -.5e3 is a value; every other word with a dash in front is a flag.
_NEGATIVE = re.compile(r"^-(\d|\.\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What was typed, by option name, and what is wrong with it."""

    typed: dict[str, Typed]
    problems: tuple[Problem, ...] = ()
    is_ms_swift: bool = False


@dataclass(slots=True)
class _Flag:
    name: str
    words: list[str] = field(default_factory=list)


def parse(argv: Sequence[str]) -> Parsed:
    """Return the options of a command line, those of its YAML file overridden by its flags."""
    files, flags = _split(argv)
    layer = Layer()
    for flag in flags:
        if normalise(flag.name) == "config":
            files += flag.words
        else:
            _take_flag(layer, flag)
    problems = list(layer.problems)
    if len(files) > 1:
        problems.insert(0, stray(files[1:], files[0]))
    if not files:
        return Parsed(typed=layer.typed, problems=tuple(problems), is_ms_swift=layer.is_ms_swift)
    below = read_file(files[0])
    return Parsed(
        typed=merge(below.typed, layer.typed),
        problems=(*below.problems, *problems),
        is_ms_swift=layer.is_ms_swift or below.is_ms_swift,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[_Flag]]:
    files: list[str] = []
    flags: list[_Flag] = []
    for word in argv:
        if word.startswith("-") and not _NEGATIVE.match(word):
            name, equals, value = word.partition("=")
            flags.append(_Flag(name, [value] if equals else []))
        elif flags:
            flags[-1].words.append(word)
        else:
            files.append(word)
    return files, flags


def _take_flag(layer: Layer, flag: _Flag) -> None:
    known = look_up(flag.name)
    source = f"flag --{known.typed}"
    if known.option is None:
        if not _take_negated(layer, flag):
            layer.take(flag.name, flag.words, source)
        return
    kind = kind_of(known.option)
    words = flag.words
    if kind.many:
        layer.take(flag.name, words or None, source)
        return
    switch = kind.base == "bool" or known.typed in SWITCHES
    if switch and (not words or words[0].lower().endswith((".yaml", ".yml"))):
        words = ["true", *words]
    elif not words and known.option in _ALONE:
        words = [_ALONE[known.option]]
    if len(words) > 1:
        layer.problems.append(stray(words[1:], f"--{known.typed}"))
    layer.take(flag.name, words[0] if words else [], source)


def _take_negated(layer: Layer, flag: _Flag) -> bool:
    """Take `--no_x` for a switch x; False where the flag is no such thing."""
    plain = normalise(flag.name)
    if not plain.startswith("no_"):
        return False
    known = look_up(plain.removeprefix("no_"))
    kind = None if known.option is None else kind_of(known.option)
    if known.typed in SWITCHES or (kind is not None and (kind.base == "bool" or "false" in kind.choices)):
        if flag.words:
            layer.problems.append(stray(flag.words, f"--{plain}"))
        layer.take(known.typed, "false", f"flag --{plain}")
        return True
    if known.refused is not None or known.moot is not None:
        layer.take(known.typed, "false", f"flag --{plain}")
        return True
    return False
