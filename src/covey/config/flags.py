"""The command line of a run: `covey train [CONFIG.yaml] --option value ...`, by the rules of `argv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.config.argv import split, take_flag
from covey.config.file import read_file
from covey.config.layers import merge
from covey.config.take import Layer, Typed, stray
from covey.options.schema import Config
from covey.texts import tr
from covey.types import Fix, Problem

__all__ = ["Parsed", "Typed", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What was typed, by option name, and what is wrong with it."""

    typed: dict[str, Typed]
    problems: tuple[Problem, ...] = ()
    is_ms_swift: bool = False


def parse(argv: Sequence[str], verb: str = "train") -> Parsed:
    """Return the options of a command line, those of its YAML file overridden by its flags; what is wrong is
    said for a verb."""
    layer = Layer(verb=verb)
    first, *flags = split(argv, Config)
    files, named = first.behind, None
    for flag in flags:
        if flag.name == "config":
            named = flag.words
        elif left := take_flag(layer, flag):
            layer.problems.append(stray(left, f"--{flag.name}", verb))
    problems = list(layer.problems)
    if named is not None:
        files = [*files, *named]
        problems += [] if named else [_no_file(verb)]
    if len(files) > 1:
        problems.insert(0, stray(files[1:], files[0], verb))
    if not files:
        return Parsed(typed=layer.typed, problems=tuple(problems), is_ms_swift=layer.is_ms_swift)
    below = read_file(files[0])
    return Parsed(
        typed=merge(below.typed, layer.typed),
        problems=(*below.problems, *problems),
        is_ms_swift=layer.is_ms_swift or below.is_ms_swift,
    )


def _no_file(verb: str) -> Problem:
    return Problem(
        code="E103",
        option="config",
        seen=tr("config needs a YAML file, but no value is given (flag --config)."),
        why=tr("covey cannot use this value."),
        cause=tr("The option has no value."),
        fixes=(
            Fix(
                text=tr(
                    "put the file before the options: `covey {verb} CONFIG.yaml --option value`", verb=verb
                )
            ),
        ),
    )
