"""How an option is declared: everything that is known of it stands there.

What reads it elsewhere is generated: flags and YAML, ranges, what a resume may change, notes on options
without effect, `--help`, docs/options.md, and the names that TRL and ms-swift have for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from covey.texts import joined, tr

Resume = Literal["fixed", "free", "length", "split"]
"""What a resume may change: nothing, all of it, the length of the run under a constant learning rate, or how
the same steps are split into processes and forward passes."""

NONE = "–"
"""In place of a default: the tool has no such option."""

_UNSET: Any = object()


class Options(BaseModel):
    """Options of one group or of several; the first line of the docstring is the group's heading."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Which numbers an option takes: `ge` at least, `gt` above, `le` at most, `lt` below, and `also` words or
    numbers outside. `why` says what is wrong with others."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[Any, ...] = ()
    why: str = ""

    def accept(self, value: Any) -> bool:
        """Whether a value lies within."""
        if value in self.also:
            return True
        return (
            isinstance(value, int | float)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    @property
    def words(self) -> str:
        """`1 or more`, `above 0 and at most 1`."""
        if self.ge is not None and self.le is not None:
            one = tr("from {low:g} to {high:g}", low=self.ge, high=self.le)
        else:
            low = "" if self.gt is None else tr("above {low:g}", low=self.gt)
            if self.ge is not None:
                at_least = tr("at least {low:g}", low=self.ge)
                low = tr("{low:g} or more", low=self.ge) if self.lt is None else at_least
            high = "" if self.lt is None else tr("below {high}", high=_plain(self.lt))
            high = high if self.le is None else tr("at most {high:g}", high=self.le)
            one = tr("{low} and {high}", low=low, high=high) if low and high else low or high
        texts = [word for word in self.also if isinstance(word, str)]
        if texts:
            return tr("{words}, or {range}", words=joined(", ", texts), range=one)
        return (
            tr("{range}, or {unset}, which means not set", range=one, unset=self.also[0])
            if self.also
            else one
        )


def _plain(number: float) -> str:
    return f"2^{int(number).bit_length() - 1}" if number >= 1 << 32 else f"{number:g}"


@dataclass(frozen=True, slots=True)
class ReadIf:
    """An option is read only where another one has one of these values; no values are any but None and an
    empty list."""

    option: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether it is read where that option has this value."""
        return value in self.values if self.values else value is not None and value != []

    def why_not(self, value: Any) -> str:
        """Why it is not read there."""
        if not self.values:
            return tr("{option} is not set", option=self.option)
        if self.values == (True,):
            return tr("{option} is off", option=self.option)
        return tr("{option} {value} does not use it", option=self.option, value=value)


def only_with(option: str, *values: Any) -> ReadIf:
    """Read only where `option` has one of the values."""
    return ReadIf(option, values)


def only_if_set(option: str) -> ReadIf:
    """Read only where `option` is neither None nor an empty list."""
    return ReadIf(option)


@dataclass(frozen=True, slots=True)
class PathKind:
    """Marks an option whose values are, or may be, paths of files or directories. `code` is the code of the
    problem if one cannot be read. With `or_text`, a value that cannot be a path is text; without it, it is a
    problem."""

    code: str
    or_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a declaration says beside type, default and help text; `option` has the words for each."""

    rule: str = ""
    bounds: Bounds | None = None
    usual: Any = None
    resume: Resume = "fixed"
    read_if: ReadIf | None = None
    trl: str = NONE
    swift: str = NONE
    rlhf: Any = _UNSET
    names: tuple[str, ...] = ()
    switches: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    alone: str | None = None
    path: PathKind | None = None
    verbatim: bool = False

    @property
    def is_of_rlhf(self) -> bool:
        """Whether `covey rlhf` has a default of its own."""
        return self.rlhf is not _UNSET


def option(
    default: Any,
    doc: str,
    *,
    rule: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    also: tuple[Any, ...] = (),
    why: str = "",
    usual: Any = None,
    **facts: Any,
) -> Any:
    """A field of `Options`: its default, `...` where it is required or follows from others, and its help.

    rule             how it follows from others when it is not typed, in words; `derive.py` computes it
    ge, gt, le, lt   as pydantic has them, with `also` for words and numbers outside; `why` others are wrong;
                     `usual` is a value that is always right, where the default is none
    resume           what a resume may change (`Resume`)
    read_if          the condition under which it is read at all
    trl, swift       its default in TRL and in ms-swift; left out where they have no such option
    rlhf             its default in `covey rlhf`, where that is ms-swift's
    names            other names of TRL and ms-swift for it; `switches` are those that take true and false,
                     with the words that these mean; `hints` are names that are offered and never taken
    words            other words for its values; `alone` is the word for the flag without one
    path             that its values name files or directories (`PathKind`)
    verbatim         that it is text with its white space, commas and brackets; \\n and \\t are read as such
    """
    has_bounds = any(bound is not None for bound in (ge, gt, le, lt))
    bounds = Bounds(ge=ge, gt=gt, le=le, lt=lt, also=also, why=why) if has_bounds else None
    if usual is None and default is not ...:
        usual = default
    extra = {"facts": Facts(rule=rule, bounds=bounds, usual=usual, **facts)}
    # pydantic writes it into a JSON schema, which nobody makes of these classes.
    return Field(default, description=doc, json_schema_extra=extra)  # type: ignore[arg-type]


def fields_of(declares: type[Options]) -> dict[str, FieldInfo]:
    """Return the options that a class declares, each by the name that is typed."""
    return {field.alias or name: field for name, field in declares.model_fields.items()}


def facts_of(declares: type[Options]) -> dict[str, Facts]:
    """Return what a class declares of each option beside its type, its default and its help text."""
    return {
        name: field.json_schema_extra["facts"]  # type: ignore[index,misc]
        for name, field in fields_of(declares).items()
    }
