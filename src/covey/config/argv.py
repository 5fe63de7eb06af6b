"""From the words of a command line to values of declared options; every verb reads its words here.

Flags are spelled with dashes or underscores, in any case. A list takes several words, or one with commas; a
repeated flag replaces, a switch is `--x`, `--x true`, `--x false` or `--no_x`, and `--x=value` works
everywhere. A word that cannot be a flag is a value, though it begins with a dash. What is wrong becomes a
problem, so that all of it is shown together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from covey.config.names import LONG_DASHES, SWITCHES, Name, look_up, nearest, normalise
from covey.config.take import Layer, stray
from covey.config.unreadable import without_unreadable
from covey.config.values import FALSE_WORDS, TRUE_WORDS, kind_of
from covey.errors import ConfigError
from covey.options.declare import Options, facts_of
from covey.texts import tr

Declares = type[Options]
Own = TypeVar("Own", bound=Options)

# What a flag looks like, with its value behind the equals sign. Words such as -1, ---, -.5e3 or "- be brief"
# are values.
_FLAG = re.compile(rf"(--?|[{LONG_DASHES}]{{1,2}})[A-Za-z_][\w.-]*(=.*)?", re.DOTALL)


@dataclass(slots=True)
class Flag:
    """A flag as it was typed, and the words up to the next one; "" holds those in front of every flag."""

    typed: str
    behind: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name as options are written."""
        return normalise(self.typed.partition("=")[0])

    @property
    def words(self) -> list[str]:
        """The value behind the equals sign and the words behind it."""
        _, equals, value = self.typed.partition("=")
        return [value, *self.behind] if equals else self.behind


def read_words(
    verb: str, argv: Sequence[str], declares: type[Own], most: int | None = 1
) -> tuple[Own, list[str]]:
    """Return the options of a verb that has its own alone, and its words, `most` of them or any number.

    Raises ConfigError with everything that is wrong with them.
    """
    layer = Layer(declares, verb)
    words: list[str] = []
    for flag in split(argv, declares):
        words += take_flag(layer, flag, has_words=True) if flag.typed else flag.behind
    if most is not None and len(words) > most:
        layer.problems.append(stray(words[most:], words[most - 1] if most else verb))
    typed, unreadable = without_unreadable(layer.typed, declares)
    if problems := [*layer.problems, *unreadable]:
        raise ConfigError(problems)
    return declares(**{name: of.value for name, of in typed.items()}), words


def take_out(
    verb: str, argv: Sequence[str], declares: Declares, *others: Declares, has_words: bool = True
) -> tuple[Layer, list[str]]:
    """Return what is typed of the options of one class, and all other words; `others` declare the rest.

    With `has_words` a switch takes true and false, and leaves any other word to the verb.
    """
    layer = Layer(declares, verb)
    rest: list[str] = []
    is_behind = False
    for flag in split(argv, declares, *others):
        if not flag.typed or not _is_of(flag, declares, *others):
            rest += [*([flag.typed] if flag.typed else []), *flag.behind]
            is_behind = is_behind or bool(flag.typed)
            continue
        left = take_flag(layer, flag, has_words=has_words)
        if left and is_behind and others:
            # They would fall to an option that stands further in front.
            layer.problems.append(stray(left, f"--{flag.name}"))
        else:
            rest += left
    return layer, rest


def split(argv: Sequence[str], *declares: Declares) -> list[Flag]:
    """Return the flags of a command line, each with the words behind it; first the words before all flags."""
    flags = [Flag("")]
    for word in argv:
        if _is_flag(word, flags[-1], declares):
            flags.append(Flag(word))
        else:
            flags[-1].behind.append(word)
    return flags


def take_flag(layer: Layer, flag: Flag, *, has_words: bool = False) -> list[str]:
    """Give a flag to a layer and return the words behind it that it does not take."""
    known = layer.look_up(flag.name)
    source = tr("flag --{name}", name=known.typed)
    if known.option is None:
        left = _take_negated(layer, flag)
        return _take_foreign(layer, flag, known) if left is None else left
    kind, words = layer.kind_of(known.option), flag.words
    if kind.many:
        if words:
            layer.take(flag.name, words, source)
        else:
            layer.lacks_value(known.option, source)
        return []
    is_alone = not words or ("=" not in flag.typed and _is_left(words[0], has_words))
    alone = "true" if _is_switch(known, kind.base) else facts_of(layer.declares)[known.option].alone
    if is_alone and alone is not None:
        words = [alone, *words]
    layer.take(flag.name, words[0] if words else [], source)
    return words[1:]


def _take_foreign(layer: Layer, flag: Flag, known: Name) -> list[str]:
    """Give a name that is no option to a layer; a word too many behind one that says what is done anyway
    must not be lost, such as a configuration file."""
    words, source = flag.words, tr("flag --{name}", name=known.typed)
    if known.typed == "rlhf_type":
        layer.take(flag.name, words[:1], source)
        return words[1:]
    files = [word for word in words if _is_left(word, has_words=False)] if known.moot is not None else []
    kept = [word for word in words if word not in files]
    is_other = known.moot is not None or known.refused is not None
    # A name without a value says yes; an empty one would say nothing.
    layer.take(flag.name, kept or (["true"] if is_other else []), source)
    return files


def _is_switch(known: Name, base: str) -> bool:
    return base == "bool" or known.typed in SWITCHES


def _is_left(word: str, has_words: bool) -> bool:
    """Whether a word behind a switch is none of its values, but one of the verb or a file."""
    plain = word.lower()
    return plain.endswith((".yaml", ".yml")) or (has_words and plain not in TRUE_WORDS | FALSE_WORDS)


def _take_negated(layer: Layer, flag: Flag) -> list[str] | None:
    """Take `--no_x` for a switch x and return the words behind it; None where the flag is no such thing."""
    if not flag.name.startswith("no_"):
        return None
    known = layer.look_up(flag.name.removeprefix("no_"))
    kind = None if known.option is None else layer.kind_of(known.option)
    is_switch = kind is not None and (_is_switch(known, kind.base) or "false" in kind.choices)
    if not is_switch and known.refused is None and known.moot is None:
        return None
    layer.take(known.typed, "false", tr("flag --{name}", name=flag.name))
    return flag.words


def _is_flag(word: str, before: Flag, declares: tuple[Declares, ...]) -> bool:
    match = _FLAG.fullmatch(word)
    if match is None:
        return False
    if match[1] != "-" or not before.typed or before.words or _is_known(Flag(word).name, declares):
        return True
    # One dash before a name that nobody knows: the text of an option that waits for it, as in `--system -x`.
    for one in declares:
        known = look_up(before.name, one)
        if known.option is not None:
            return _is_switch(known, kind_of(known.option, one).base)
    return True


def _is_known(plain: str, declares: tuple[Declares, ...]) -> bool:
    for one in declares:
        known = look_up(plain, one)
        known = look_up(plain.removeprefix("no_"), one) if known.option is None else known
        if any((known.option, known.moot, known.refused, known.nearest)):
            return True
    return plain == "config"


def _is_of(flag: Flag, declares: Declares, *others: Declares) -> bool:
    """Whether a flag is an option of a class, or none of any and most like one of it."""
    known = look_up(flag.name, declares)
    if known.option or look_up(flag.name.removeprefix("no_"), declares).option:
        return True
    theirs = [look_up(flag.name, other) for other in others]
    if not known.nearest or not theirs or any(n.option or n.moot or n.refused for n in theirs):
        return False
    return nearest(flag.name, [known.nearest, *(n.nearest for n in theirs if n.nearest)]) == known.nearest
