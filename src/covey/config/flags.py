"""The command line: `covey train [CONFIG.yaml] --option value ...`.

Flags are spelled with dashes or underscores, in any case. A list takes several words, or one with commas; a
repeated flag replaces, a switch is `--x`, `--x true`, `--x false` or `--no_x`, and `--x=value` works
everywhere. A word that cannot be a flag is a value, though it begins with a dash. What is wrong becomes a
problem, so that all of it is shown together.
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
from covey.options.schema import FACTS
from covey.types import Problem

__all__ = ["Parsed", "Typed", "parse"]

# What a flag looks like, with its value behind the equals sign. Words such as -1, ---, -.5e3 or "- be brief"
# are values.
_FLAG = re.compile(r"(--?)[A-Za-z_][\w.-]*(=.*)?", re.DOTALL)


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
        if _is_flag(word, flags[-1] if flags else None):
            name, equals, value = word.partition("=")
            flags.append(_Flag(name, [value] if equals else []))
        elif flags:
            flags[-1].words.append(word)
        else:
            files.append(word)
    return files, flags


def _is_flag(word: str, before: _Flag | None) -> bool:
    match = _FLAG.fullmatch(word)
    if match is None:
        return False
    if match[1] == "--" or before is None or before.words or _is_known(word.partition("=")[0]):
        return True
    # One dash before a name that nobody knows: the text of an option that waits for it, as in `--system -x`.
    known = look_up(before.name)
    return known.option is None or known.typed in SWITCHES or kind_of(known.option).base == "bool"


def _is_known(name: str) -> bool:
    plain = normalise(name)
    known = look_up(plain.removeprefix("no_") if look_up(plain).option is None else plain)
    return plain in ("config", "h") or any((known.option, known.moot, known.refused, known.nearest))


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
    elif not words and (alone := FACTS[known.option].alone) is not None:
        words = [alone]
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
