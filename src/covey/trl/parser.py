"""`TrlParser`: the command line and the configuration file of a training script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import yaml
from transformers.hf_argparser import HfArgumentParser

from covey.config.names import look_up
from covey.options.schema import doc_of
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.trl.fields import Fields
from covey.trl.model_config import ModelConfig
from covey.trl.script import DatasetMixtureConfig, ScriptArguments

_WITH_HELP = (Fields, ModelConfig, ScriptArguments, DatasetMixtureConfig)


class TrlParser(HfArgumentParser):
    """Fills dataclasses from a command line, and from the YAML file that `--config` names.

    The command line overrides the file. Variables under `env` in the file are set in the environment.
    """

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        given = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        kinds = [kind for kind in given if kind is not None]
        for kind in kinds:
            if any(one.name == "config" for one in fields(kind)):
                raise ValueError(
                    tr("{kind} has a field `config`, but --config names the file.", kind=kind.__name__)
                )
        super().__init__(dataclass_types=kinds, **options)
        known = {one.name for base in _WITH_HELP if _has(kinds, base) for one in fields(base)}
        for action in self._actions:
            if action.help is None and action.dest in known:
                action.help = _help_of(action.dest)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return the dataclasses; with `return_remaining_strings` also the words that none of them has.

        ValueError names words and keys that no dataclass has; keys of the file only with
        `fail_with_unknown_args`.
        """
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, words = finder.parse_known_args(sys.argv[1:] if args is None else list(args))
        of_file = [] if found.config is None else self._read(found.config)
        output = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *parsed, rest = output
            return (*parsed, of_file, rest) if separate_remaining_strings else (*parsed, of_file + rest)
        if of_file and fail_with_unknown_args:
            keys = joined(", ", [word.removeprefix("--") for word in of_file[::2]])
            raise ValueError(
                tr(
                    "{path} has keys that no argument of the script has: {keys}.",
                    path=found.config,
                    keys=keys,
                )
            )
        return output

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Make the values the defaults of their arguments; return the others as words, `--name value`."""
        known = set()
        for parser in _with_subparsers(self):
            for action in parser._actions:
                if action.dest in values:
                    action.default, action.required = values[action.dest], False
                    known.add(action.dest)
        others = {name: value for name, value in values.items() if name not in known}
        return [word for name, value in others.items() for word in (f"--{name}", str(value))]

    def _read(self, path: str) -> list[str]:
        """The words of a file that no argument takes; the others become defaults."""
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
        if not isinstance(values, dict):
            raise ValueError(tr("{path} is no mapping of names to values.", path=path))
        variables = values.pop("env", {})
        if not isinstance(variables, dict):
            raise ValueError(tr("env in {path} is no mapping of names to values.", path=path))
        os.environ.update({name: str(value) for name, value in variables.items()})
        return self.set_defaults_with_config(**values)


def _with_subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _with_subparsers(below)


def _has(kinds: list[type], base: type) -> bool:
    return any(issubclass(kind, base) for kind in kinds)


def _help_of(name: str) -> str:
    """Return what covey does with a field, in words."""
    known = look_up(name)
    words = doc_of(known.option) if known.option else known.moot.words if known.moot else known.refused
    return spoken(words or "").replace("%", "%%")
