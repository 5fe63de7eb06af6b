"""One layer of typed options: a command line, a file or a mapping, each name looked up and each value
converted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from covey.codes import CODES
from covey.config.foreign import instead_of
from covey.config.moot import Moot
from covey.config.names import HINTS, Name, look_up, nearest, normalise, switch_value
from covey.config.programs import is_whole_config, of_program
from covey.config.values import (
    FALSE_WORDS,
    NONE_WORDS,
    TRUE_WORDS,
    Kind,
    UnfitError,
    coerce,
    default_in,
    kind_of,
)
from covey.options.declare import Options
from covey.options.schema import Config
from covey.options.verbs import PLAN_WORDS
from covey.texts import joined, tr
from covey.types import Fix, Problem, Severity


@dataclass(frozen=True, slots=True)
class Typed:
    """A value in its option's type and where it was typed, as `flag --seed` or `config.yaml: run.seed`; with
    the name that was typed, where it is not the option's own."""

    value: Any
    source: str
    name: str = ""


class Layer:
    """Collects the options of one place; `typed` and `problems` are what came of it.

    They are those that the class `declares`, and `verb` is whose `--help` lists them. `named` are all that
    were typed, those with a value at fault among them. `is_ms_swift` where `rlhf_type` is among them: it is a
    command of ms-swift, whose defaults it means. Where `is_whole` nobody typed the single names, they are all
    fields of a configuration of TRL: those without effect are not named.
    """

    def __init__(
        self, declares: type[Options] = Config, verb: str = "train", *, is_whole: bool = False
    ) -> None:
        self.declares = declares
        self.verb = verb
        self.named: set[str] = set()
        self.typed: dict[str, Typed] = {}
        self.is_ms_swift = False
        self.is_whole = is_whole
        self.problems: list[Problem] = []

    def take(self, name: str, value: Any, source: str) -> None:
        """Add one option under any of its names; faults are added to the problems.

        None, or null in YAML, is a value where the option has one that is not set; elsewhere, as for a name
        of another tool, the name counts as not typed.
        """
        known = self.look_up(name)
        if self._is_unset(known, value):
            return
        if known.option is not None:
            self._add(known.option, switch_value(known.typed, value), source, known.typed)
        elif self.declares is not Config:
            self.problems.append(self._unknown(known, value, source))
        elif known.typed == "rlhf_type":
            self.problems += _other_method(value, source)
            self.is_ms_swift = True
        elif known.typed in PLAN_WORDS:
            self.problems.append(_of_plan(known.typed, value, source))
        elif known.moot is not None and _word(value) in known.moot.means:
            self._add(*known.moot.means[_word(value)], source, known.typed)
        elif known.moot is not None:
            note = _moot(known.typed, known.moot, value, source)
            if not (self.is_whole and note.severity is Severity.NOTE):
                self.problems.append(note)
        elif known.refused is not None:
            self.problems.append(refused(known, source))
        else:
            self.problems.append(self._unknown(known, value, source))

    def _is_unset(self, known: Name, value: Any) -> bool:
        if self.is_whole and known.option == "max_completion_length":
            # In TRL completions then have no limit of their own, which is not the default here.
            return False
        if known.option is not None:
            kind = self.kind_of(known.option)
            return value is None and not (kind.optional or kind.base == "json")
        if known.moot is None and known.refused is None:
            return value is None and known.typed == "rlhf_type"
        return _is_empty(value) and not (known.moot is not None and "none" in known.moot.means)

    def look_up(self, name: str) -> Name:
        """Say what a typed name is among these options."""
        return look_up(name, self.declares)

    def kind_of(self, option: str) -> Kind:
        """Return what one of these options takes."""
        return kind_of(option, self.declares)

    def _add(self, option: str, value: Any, source: str, name: str) -> None:
        self.named.add(option)
        try:
            new = Typed(coerce(option, value, self.declares), source, "" if name == option else name)
        except UnfitError as unfit:
            self.problems.append(self._unfit(option, value, source, unfit))
            return
        old = self.typed.get(option)
        if old is not None and _flag_of(old.source) != _flag_of(source) and old.value != new.value:
            self.problems.append(_twice(option, old, new))
        self.typed[option] = new

    def lacks_value(self, option: str, source: str) -> None:
        """Say of a list that nothing stands behind it, as behind `--val_dataset $NAME` without that name."""
        unfit = UnfitError(
            tr(
                "{option} takes {words}, but no value is given",
                option=option,
                words=self.kind_of(option).words,
            )
        )
        self.named.add(option)
        self.problems.append(self._unfit(option, [], source, unfit))

    def _unknown(self, known: Name, value: Any, source: str) -> Problem:
        """Return the problem of a name nobody knows, with the nearest option."""
        listing = Fix(text=tr("`covey {verb} --help` lists every option", verb=self.verb))
        near = known.nearest
        fixes: tuple[Fix, ...] = (listing,)
        if near is not None:
            try:
                edits = {near: coerce(near, value, self.declares)}
                fixes = (Fix(text=tr("did you mean {near}?", near=near), edits=edits), listing)
            except UnfitError:
                takes = self.kind_of(near).words
                fixes = (
                    Fix(text=tr("did you mean --{near}? It takes {takes}", near=near, takes=takes)),
                    listing,
                )
        return Problem(
            code="E101",
            option=known.typed,
            seen=tr("covey has no option named {typed} ({source}).", typed=known.typed, source=source),
            why=tr("If it were ignored, the run would not use the value that you gave.")
            if self.declares is Config
            else tr("If it were ignored, the run would not do what the command says."),
            cause=_cause_of_unknown(known.typed, near),
            fixes=fixes,
        )

    def _unfit(self, option: str, value: Any, source: str, unfit: UnfitError) -> Problem:
        kind, default = self.kind_of(option), default_in(self.declares, option)
        if unfit.choice:
            word = value[0] if isinstance(value, list | tuple) and value else value
            choice = nearest(str(word), kind.choices, cutoff=0.0) or kind.choices[0]
            fix = Fix(
                text=tr("the nearest possible value is {choice}", choice=choice), edits={option: choice}
            )
        elif default is not None:
            text = tr("it takes {words}; its default is {default}", words=kind.words, default=default)
            fix = Fix(text=text, edits={option: default})
        else:
            fix = Fix(text=tr("--{option} takes {words}", option=option, words=kind.words))
        return Problem(
            code="E104" if unfit.choice else "E103",
            option=option,
            seen=tr("{unfit} ({source}).", unfit=unfit, source=source),
            why=tr("covey cannot use this value."),
            fixes=(fix,),
        )


def _flag_of(source: str) -> str:
    """The flag of a source; `--no_x` is the flag x."""
    return source.replace("--no_", "--")


def take_mapping(options: Mapping[str, Any], source: str) -> Layer:
    """Return the layer of a flat mapping, each value with the same source."""
    layer = Layer(is_whole=is_whole_config(options))
    seen: dict[str, str] = {}
    for name, value in of_program(options).items():
        spelled = seen.setdefault(normalise(str(name)), str(name))
        option = layer.look_up(spelled).option
        is_plain = spelled == name and option in (None, normalise(spelled))
        layer.take(spelled, value, source if is_plain else tr("{source} {name}", source=source, name=name))
    return layer


def refused(known: Name, source: str) -> Problem:
    """Return the problem of a name that another tool or a later version has."""
    instead = instead_of(known.typed)
    text = (
        tr("leave out --{name} and use {instead}", name=known.typed, instead=instead)
        if instead
        else tr("leave out --{name}; there is no replacement", name=known.typed)
    )
    return Problem(
        code="E102",
        option=known.typed,
        seen=tr("This version of covey has no option {typed} ({source}).", typed=known.typed, source=source),
        why=known.refused or "",
        cause=tr("The command comes from TRL, from ms-swift or from another version of covey."),
        fixes=(Fix(text=text),),
    )


def _of_plan(name: str, value: Any, source: str) -> Problem:
    """Return the problem of a word that `covey plan` alone takes, and on its command line."""
    fixes: tuple[Fix, ...]
    # The source of a file is its path, a colon and the key.
    path, colon, _ = source.rpartition(": ")
    if not colon:
        cause = tr("The option belongs to `covey plan`, but the command is another one.")
        fixes = (
            Fix(text=tr("`covey plan ... --{name}`", name=name)),
            Fix(text=tr("leave out --{name}", name=name)),
        )
    else:
        cause = tr(
            "A configuration file describes a run; `covey train` uses the machine on which it is started."
        )
        word = "" if value is True else f" {value}"
        fixes = (
            Fix(
                text=tr(
                    "remove it from the file, and run `covey plan {path} --{name}{word}`",
                    path=path,
                    name=name,
                    word=word,
                )
            ),
        )
    return Problem(
        code="E212",
        option=name,
        seen=tr("{name} ({source}) is an option of `covey plan` only.", name=name, source=source),
        why=CODES["E212"].why,
        cause=cause,
        fixes=fixes,
    )


def _other_method(value: Any, source: str) -> list[Problem]:
    """Return nothing for `rlhf_type grpo`, which is what covey does, and a problem for any other."""
    word = value[0] if isinstance(value, list | tuple) and value else value
    if str(word).lower() == "grpo":
        return []
    return [
        Problem(
            code="E114",
            option="rlhf_type",
            seen=tr("rlhf_type is {word} ({source}).", word=word or tr("not given"), source=source),
            why=CODES["E114"].why,
            cause=tr("The command uses another training method of ms-swift."),
            fixes=(Fix(text=tr("GRPO: `covey rlhf --rlhf_type grpo ...`")),),
        )
    ]


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing: none, or a list or an object with nothing in it."""
    if isinstance(value, list | tuple):
        return all(_is_empty(one) for one in value)
    if isinstance(value, Mapping | set):
        return not value
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", *NONE_WORDS))


def _word(value: Any) -> str:
    word = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if isinstance(word, str) and word.startswith("{"):
        with suppress(ValueError):
            word = json.loads(word)
    return (json.dumps(word, default=str) if isinstance(word, Mapping) else str(word)).lower()


def _moot(name: str, moot: Moot, value: Any, source: str) -> Problem:
    """Return the note on a name that says what is done anyway, or the problem of a value that says more."""
    word = _word(value)
    if not moot.values or any(_is_same(word, one) for one in moot.values):
        return Problem(
            code="W108",
            option=name,
            seen=tr("{name} {word} ({source}) has no effect.", name=name, word=word, source=source),
            why=moot.words,
            severity=Severity.NOTE,
        )
    return Problem(
        code="E102",
        option=name,
        seen=tr(
            "{name} {word} ({source}) is not supported by this version.",
            name=name,
            word=word,
            source=source,
        ),
        why=moot.words,
        cause=tr("The command comes from TRL, from ms-swift or from another version of covey."),
        fixes=(Fix(text=_without(name, moot)),),
    )


def _without(name: str, moot: Moot) -> str:
    """What to type instead of a value that is not taken."""
    instead = instead_of(name)
    if instead:
        return tr("leave out --{name} and use {instead}", name=name, instead=instead)
    values = joined(tr(" or "), _distinct(moot.values))
    return tr("leave out --{name}; covey works as with --{name} {values}", name=name, values=values)


def _distinct(values: Sequence[str]) -> Sequence[str]:
    """The values that a name may have; of numbers, which are spellings of one setting, the first."""
    return values[:1] if values[0].strip("-")[0].isdigit() else values


def _is_same(word: str, value: str) -> bool:
    """Whether two words say the same: `no` and `false`, `1.00` and `1`."""
    if value in ("true", "false"):
        return word in (TRUE_WORDS if value == "true" else FALSE_WORDS)
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _cause_of_unknown(typed: str, near: str | None) -> str:
    if near is None:
        return tr("No option has a similar name.")
    if typed in HINTS:
        return tr("Other tools use this name for {near}.", near=near)
    return tr("The name is close to that of {near}.", near=near)


def _twice(option: str, old: Typed, new: Typed) -> Problem:
    return Problem(
        code="E106",
        option=option,
        seen=tr(
            "{option} has two values: {value} ({source}) and {other} ({other_source}).",
            option=option,
            value=old.value,
            source=old.source,
            other=new.value,
            other_source=new.source,
        ),
        why=tr("Both names mean the same option, and an option has only one value."),
        fixes=tuple(
            Fix(text=tr("keep the value from {source}", source=t.source), edits={option: t.value})
            for t in (old, new)
        ),
    )


def stray(words: Sequence[str], after: str, verb: str = "train") -> Problem:
    """Return the problem of words that belong to no option."""
    shown = " ".join(words)
    is_file = words[0].lower().endswith((".yaml", ".yml"))
    fix = (
        tr("put it first: `covey {verb} {words} --option value`", verb=verb, words=words[0])
        if is_file
        else tr("remove `{shown}`; a value with spaces in it needs quotes", shown=shown)
    )
    return Problem(
        code="E108",
        option=after,
        seen=tr("`{shown}` after {after} does not belong to any option.", shown=shown, after=after),
        why=tr("If it were ignored, a part of a value might be lost."),
        cause=tr("A configuration file must come before the options.")
        if is_file
        else tr("There is one value too many, or quotes are missing."),
        fixes=(Fix(text=fix),),
    )
