"""Typed options whose paths cannot be read: each is a problem, and the other checks run without it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from covey.codes import CODES
from covey.config.take import Typed
from covey.options.declare import Options, PathKind, facts_of
from covey.options.schema import Config
from covey.paths import Trouble, trouble
from covey.texts import tr
from covey.types import Fix, Problem

_WITH: Mapping[str, tuple[str, ...]] = {
    "output_dir": ("resume_from_checkpoint",),
    "resume_from_checkpoint": ("output_dir",),
    "val_dataset": ("eval_strategy", "load_best_model_at_end", "early_stopping_patience"),
}
"""Options that mean nothing without the path of another one; a resumed run goes on in the directory of
its checkpoint."""


def without_unreadable(
    typed: Mapping[str, Typed], declares: type[Options] = Config
) -> tuple[dict[str, Typed], list[Problem]]:
    """Return the options whose paths are readable or do not exist, and a problem for each of the others."""
    problems: list[Problem] = []
    for name, facts in facts_of(declares).items():
        if name in typed and facts.path is not None:
            problems += _problems(name, typed[name], facts.path)
    faulty = {problem.option for problem in problems}
    faulty.update(*(_WITH[name] for name in faulty & _WITH.keys()))
    return {name: of for name, of in typed.items() if name not in faulty}, problems


def fixes_of(found: Trouble, other: str) -> tuple[Fix, ...]:
    """Return the fixes for an unreadable path: the command that makes it readable, if known, and `other`."""
    return (*((Fix(text=_command(found)),) if found.command else ()), Fix(text=other))


def _command(found: Trouble) -> str:
    if found.owner:
        return tr("ask the owner, {owner}, to type `{command}`", command=found.command, owner=found.owner)
    return tr("`{command}`", command=found.command)


def _problems(name: str, typed: Typed, kind: PathKind) -> Iterator[Problem]:
    entries = typed.value if isinstance(typed.value, list) else [typed.value]
    for entry in entries:
        readings = _readings(entry) if isinstance(typed.value, list) else (str(entry),)
        found = next((one for path in readings if (one := _found(path, kind)) is not None), None)
        if entry is not None and found is not None:
            yield Problem(
                code=kind.code,
                option=name,
                seen=tr(
                    "{name} is {entry} ({source}), which {words}.",
                    name=name,
                    entry=entry,
                    source=typed.source,
                    words=found.words,
                ),
                why=CODES[kind.code].why,
                fixes=fixes_of(found, tr("give another path: --{name} PATH", name=name)),
            )


def _found(path: str, kind: PathKind) -> Trouble | None:
    """Why a path cannot be read. If the option also takes text, a value of several lines, or one that
    cannot be a path, counts as text."""
    if not kind.or_text:
        return trouble(path)
    found = None if "\n" in path else trouble(path)
    return found if found is not None and found.kind in ("permission", "other") else None


def _readings(entry: str) -> Iterator[str]:
    """The paths that an entry of a list may name: all of it, or the part between `NAME=` and `#N`, `@SPLIT`,
    `:SUBSET` or `:FUNCTION`. If one of them exists, the rest are not needed."""
    for name in (entry, entry.partition("=")[2]):
        while name:
            yield name
            if os.path.exists(os.path.expanduser(name)):
                return
            cut = max(name.rfind(mark) for mark in "#@:")
            name = name[:cut] if cut > 0 and "/" not in name[cut:] else ""
