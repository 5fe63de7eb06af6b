"""The names people type: our own, and those of TRL and ms-swift for the same thing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from covey.config.foreign import MOOT, REFUSED, REFUSED_PREFIXES
from covey.config.moot import Moot
from covey.options.declare import Options, facts_of
from covey.options.schema import FACTS, GROUPS, OPTIONS, Config

ALIASES: Mapping[str, str] = {alias: name for name, facts in FACTS.items() for alias in facts.names}
"""Names that mean one of our options; `bf16` and `use_peft` take true or false, see `switch_value`."""

HINTS: Mapping[str, str] = {hint: name for name, facts in FACTS.items() for hint in facts.hints}
"""What a name of other tools most likely means; offered as a suggestion, never taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What a typed name is: an option, a name that says what is done anyway, a refused one with the reason,
    or unknown with the nearest option."""

    typed: str
    option: str | None = None
    moot: Moot | None = None
    refused: str | None = None
    nearest: str | None = None


_MOST_EDITS = 2
_LETTERS_PER_EDIT = 3

LONG_DASHES = "\u2012\u2013\u2014\u2212"
"""What word processors and web pages make of the dashes in front of an option."""


def normalise(name: str) -> str:
    """Return a name as options are written: lower case, underscores, no leading dashes."""
    return name.strip().lstrip(f"-{LONG_DASHES}").replace("-", "_").lower()


def look_up(name: str, declares: type[Options] = Config) -> Name:
    """Say what a typed name is among the options of a class; those of a run have names of other tools too."""
    plain = normalise(name)
    if declares is not Config:
        return _look_up(plain, declares)
    if plain in OPTIONS:
        return Name(typed=plain, option=plain)
    if plain in ALIASES:
        return Name(typed=plain, option=ALIASES[plain])
    if plain in MOOT:
        return Name(typed=plain, moot=MOOT[plain])
    if plain in REFUSED:
        return Name(typed=plain, refused=REFUSED[plain])
    for prefix, words in REFUSED_PREFIXES.items():
        if plain.startswith(prefix):
            return Name(typed=plain, refused=words)
    return Name(typed=plain, nearest=nearest_option(plain))


def _look_up(plain: str, declares: type[Options]) -> Name:
    names = {name: option for option, facts in facts_of(declares).items() for name in (option, *facts.names)}
    if plain in names:
        return Name(typed=plain, option=names[plain])
    match = _close(plain, list(names))
    return Name(typed=plain, nearest=names[match] if match else None)


def nearest_option(plain: str) -> str | None:
    """Return the option that an unknown name most likely means: one with a name that is close enough to be
    the same name misspelled, or the one that a name of other tools means; None if there is neither."""
    if plain in HINTS:
        return HINTS[plain]
    match = _close(plain, [*OPTIONS, *ALIASES])
    return ALIASES.get(match, match) if match else None


def _close(plain: str, names: Sequence[str]) -> str | None:
    """The name that `plain` misspells: the nearest of those with one or two other letters, or the one that
    has the same parts in another order; None where there is none, since another option would be a guess."""
    parts = sorted(plain.split("_"))
    for name in names:
        if sorted(name.split("_")) == parts:
            return name
    letters = plain.replace("_", "")
    limit = min(_MOST_EDITS, len(letters) // _LETTERS_PER_EDIT)
    distances = {name: _edits(letters, name.replace("_", ""), limit) for name in names}
    near = min(names, key=lambda name: distances[name], default=None)
    return near if near is not None and distances[near] <= limit else None


def _edits(one: str, other: str, limit: int) -> int:
    """How many letters are missing, too many, different or swapped; `limit` + 1 stands for more."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(other, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[j] = min(row[j], last[j - 2] + 1)
    return min(row[-1], limit + 1)


def nearest_group(plain: str) -> str | None:
    """Return the section of a configuration file whose name is nearest."""
    return nearest(plain, list(GROUPS))


def nearest(word: str, words: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """Return the word most like `word`, underscores and case aside; None if none is near."""
    plain = {w.lower().replace("_", ""): w for w in words}
    matches = difflib.get_close_matches(
        word.lower().replace("_", "").replace("-", ""), list(plain), n=1, cutoff=cutoff
    )
    return plain[matches[0]] if matches else None


def free_name(column: str, there: Collection[str]) -> str:
    """Return a name for a column that is not to be used, which none of these has: `unused_solution`."""
    name = f"unused_{column}"
    return name if name not in there else free_name(name, there)


SWITCHES: Mapping[str, tuple[str, str]] = {
    name: words for facts in FACTS.values() for name, words in facts.switches.items()
}
"""Names that take true or false and mean a word of an option."""


def switch_value(typed: str, value: object) -> object:
    """Return what `bf16 VALUE` or `use_peft VALUE` says about its option; other words as they are."""
    if typed not in SWITCHES:
        return value
    on, off = SWITCHES[typed]
    word = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    plain = str(word).lower()
    return (
        on if plain in ("true", "yes", "on", "1") else off if plain in ("false", "no", "off", "0") else value
    )
