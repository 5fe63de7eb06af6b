"""From what people type to the value of an option's type.

A flag gives words, YAML gives what it takes them for (`1e-6` is a string to YAML, `no` is False), Python
gives objects. All three end in the same value or in the same words about why not.
"""

from __future__ import annotations

import importlib.util
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import exists, expanduser
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from covey.options.declare import Options, facts_of, fields_of
from covey.options.schema import FACTS, Config
from covey.texts import joined, tr

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NONE_WORDS = frozenset({"none", "null", "~"})

SPELLINGS: Mapping[str, Mapping[str, Any]] = {name: f.words for name, f in FACTS.items() if f.words}
"""Other words for a value, as TRL, ms-swift and torch write them; case is ignored."""

Base = Literal["bool", "int", "float", "str", "choice", "rollout_log", "json"]


class UnfitError(ValueError):
    """A value that an option cannot take; `choice` is True where the option takes only certain words."""

    def __init__(self, words: str, choice: bool = False) -> None:
        self.choice = choice
        super().__init__(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an option takes: a base type, one or many of it, whether None is a value, the words of a choice,
    and whether each word is taken as it stands."""

    base: Base
    many: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    verbatim: bool = False

    @property
    def words(self) -> str:
        """The kind in words, as a message says it."""
        one = {
            "bool": tr("true or false"),
            "int": tr("a whole number"),
            "float": tr("a number"),
            "str": tr("text"),
            "choice": tr("one of {choices}", choices=joined(", ", self.choices)),
            "rollout_log": tr("all, none or a whole number"),
            "json": tr("a JSON object such as {example}", example='\'{"name": "value"}\''),
        }[self.base]
        if not self.many:
            return one
        return {"str": tr("one or more values"), "float": tr("one or more numbers")}.get(
            self.base, tr("one or more values, each {one}", one=one)
        )

    @property
    def placeholder(self) -> str:
        """What stands for the value in `--help`."""
        one = {
            "bool": "[true|false]",
            "int": "N",
            "float": "X",
            "str": "TEXT",
            "rollout_log": "all|none|N",
            "json": "JSON",
        }
        word = "|".join(self.choices) if self.base == "choice" else one[self.base]
        return f"{word} [{word} ...]" if self.many else word


def default_in(declares: type[Options], name: str) -> Any:
    """Return the default of an option of a class; None where it has none."""
    field = fields_of(declares)[name]
    return None if field.is_required() else field.default


def kind_of(name: str, declares: type[Options] = Config) -> Kind:
    """Return what the option called `name` of a class takes."""
    if name == "rollout_log":
        return Kind(base="rollout_log")
    annotation: Any = fields_of(declares)[name].annotation
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        optional = type(None) in get_args(annotation)
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is dict:
        return Kind(base="json", optional=optional)
    many = get_origin(annotation) is list
    if many:
        (annotation,) = get_args(annotation)
    if get_origin(annotation) is Literal:
        return Kind(base="choice", choices=get_args(annotation), many=many, optional=optional)
    bases: dict[Any, Base] = {bool: "bool", int: "int", float: "float", str: "str"}
    verbatim = facts_of(declares)[name].verbatim
    return Kind(base=bases[annotation], many=many, optional=optional, verbatim=verbatim)


def coerce(name: str, value: Any, declares: type[Options] = Config) -> Any:
    """Return `value` as the type of the option called `name`; UnfitError says in words why it is none."""
    kind = kind_of(name, declares)
    if kind.base == "json":
        return _json(name, kind, value)
    if kind.many:
        values = list(value) if isinstance(value, list | tuple) else [value]
        words = values if kind.verbatim else [part for word in values for part in _parts(word)]
        if name == "report_to":
            words = _trackers(kind, words)
        if default_in(declares, name) == [] and [str(word).lower() for word in words] == ["none"]:
            return []
        return [_one(name, kind, word) for word in words]
    if isinstance(value, list | tuple):
        if not value:
            raise UnfitError(tr("{name} takes {words}, but no value is given", name=name, words=kind.words))
        if len(value) != 1:
            raise UnfitError(
                tr(
                    "{name} takes one value, but {num_value} are given: {value}",
                    name=name,
                    num_value=len(value),
                    value=" ".join(map(str, value)),
                )
            )
        (value,) = value
    if kind.optional and (value is None or (isinstance(value, str) and value.lower() in NONE_WORDS)):
        return None
    return _one(name, kind, value)


# Words with one of these are no plain list: a pattern of names, or what a shell was to take apart.
_BRACKETS = "[](){}"


def _parts(word: Any) -> list[Any]:
    """The values of one word of a list: it is cut at its commas, as in `accuracy,format`, or read as a JSON
    list; but a file that is there has the name that it has."""
    if not isinstance(word, str):
        return [word]
    if word.startswith("["):
        try:
            parsed = json.loads(word)
        except ValueError:
            # As in [accuracy,format]; a pattern of names has more brackets, or goes on behind them.
            inner = word[1:-1]
            if not word.endswith("]") or "," not in inner or any(mark in inner for mark in _BRACKETS):
                return [word]
            return [part.strip(" '\"") for part in inner.split(",") if part.strip()]
        return parsed if isinstance(parsed, list) else [word]
    if "," not in word or any(mark in word for mark in _BRACKETS) or _is_there(word):
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()] or [word]


def _is_there(entry: str) -> bool:
    """Whether a file or a directory has this name, or what is left of it without `NAME=` before it and `#N`,
    `@SPLIT`, `:SUBSET` or `:FUNCTION` behind it."""
    for name in (entry, entry.partition("=")[2]):
        while "," in name:
            if exists(expanduser(name)):
                return True
            cut = max(name.rfind(mark) for mark in "#@:")
            name = name[:cut] if cut > 0 else ""
    return False


def _trackers(kind: Kind, words: list[Any]) -> list[Any]:
    """The words of report_to; `all` stands for every tracker whose package is installed."""
    if not any(str(word).strip().lower() == "all" for word in words):
        return words
    there = [n for n in kind.choices if n != "none" and importlib.util.find_spec(n) is not None]
    return there or ["none"]


def _json(name: str, kind: Kind, value: Any) -> dict[str, Any] | None:
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS):
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UnfitError(
                tr(
                    "{name} takes {words}, but {value!r} is not one: {error}",
                    name=name,
                    words=kind.words,
                    value=value,
                    error=error,
                )
            ) from None
    if not isinstance(value, Mapping):
        raise UnfitError(
            tr("{name} takes {words}, not {show}", name=name, words=kind.words, show=_show(value))
        )
    if name == "columns" and not all(isinstance(new, str) and new for new in value.values()):
        raise UnfitError(
            tr("{name} takes the new name of each column as text, not {show}", name=name, show=_show(value))
        )
    if name == "task_rewards":
        return {str(task): _names(name, task, rewards) for task, rewards in value.items()}
    return {str(key): item for key, item in value.items()}


def _names(name: str, task: Any, rewards: Any) -> list[str]:
    """The rewards of a task, as a list, or as one word with commas."""
    names = _parts(rewards) if isinstance(rewards, str) else rewards
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise UnfitError(
            tr(
                "{name} takes a list of rewards for each task, not {show} for {task}",
                name=name,
                show=_show(rewards),
                task=task,
            )
        )
    return list(names)


def _one(name: str, kind: Kind, value: Any) -> Any:
    if isinstance(value, Path):
        value = str(value)
    if value is None or isinstance(value, Mapping | list | tuple | set):
        raise UnfitError(
            tr("{name} takes {words}, not {show}", name=name, words=kind.words, show=_show(value))
        )
    spelled = str(value).strip().lower()
    if spelled in SPELLINGS.get(name, {}):
        return SPELLINGS[name][spelled]
    if kind.base == "choice":
        if spelled not in kind.choices:
            raise UnfitError(
                tr(
                    "{name} is {value}; it takes {choices}",
                    name=name,
                    value=value,
                    choices=joined(", ", kind.choices),
                ),
                choice=True,
            )
        return spelled
    if kind.base == "bool":
        return _bool(name, kind, value, spelled)
    if isinstance(value, bool):
        raise UnfitError(
            tr("{name} takes {words}, not {show}", name=name, words=kind.words, show=_show(value))
        )
    if kind.base == "str":
        return _text(name, kind, value)
    return _number(name, kind, value)


def _bool(name: str, kind: Kind, value: Any, spelled: str) -> bool:
    if spelled not in TRUE_WORDS | FALSE_WORDS:
        raise UnfitError(
            tr("{name} takes {words}, not {show}", name=name, words=kind.words, show=_show(value))
        )
    return spelled in TRUE_WORDS


def _text(name: str, kind: Kind, value: Any) -> str:
    if kind.verbatim and value:
        # White space counts here, and a shell hands \n on as two characters.
        return str(value).replace("\\n", "\n").replace("\\t", "\t")
    if not str(value).strip():
        raise UnfitError(tr("{name} is empty", name=name))
    return str(value)


def _number(name: str, kind: Kind, value: Any) -> int | float:
    unfit = UnfitError(tr("{name} takes {words}, not {show}", name=name, words=kind.words, show=_show(value)))
    try:
        if kind.base != "float" and isinstance(value, str | int):
            return int(value)
    except ValueError:
        # `1e3` is a whole number too, though not to int().
        pass
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise unfit from None
    if not math.isfinite(number):
        raise unfit
    if kind.base == "float":
        return number
    if not number.is_integer():
        raise unfit
    return int(number)


def _show(value: Any) -> str:
    return "nothing" if value is None else f"{value!r}"
