"""A YAML file of options: the names of the flags, flat or under the sections of config.yaml."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from covey.config.names import look_up, nearest_group, normalise
from covey.config.take import Layer
from covey.options.schema import GROUPS
from covey.texts import joined, tr
from covey.types import Fix, Problem


class _Loader(yaml.SafeLoader):
    """The safe loader, but a key given twice is an error; YAML itself would keep the last one without a
    word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node, once its keys are known to differ."""
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=tr("the key {value} appears twice", value=key.value), problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def read_file(path: str) -> Layer:
    """Return the options of a YAML file; what is wrong with it is among the problems, nothing is raised."""
    layer = Layer()
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        layer.problems.append(_unreadable(path, _words(error), _mend(path, error)))
        return layer
    if content is None:
        return layer
    if not isinstance(content, Mapping):
        layer.problems.append(
            _unreadable(
                path,
                tr("the file contains {name}, not a mapping of options", name=type(content).__name__),
                tr("use a file with lines such as `num_generations: 8`"),
            )
        )
        return layer
    for key, value in content.items():
        if isinstance(value, Mapping) and not _is_option(str(key)):
            _take_section(layer, path, str(key), value)
        elif value is None and normalise(str(key)) in GROUPS and look_up(str(key)).option is None:
            continue  # a section with nothing under it
        else:
            layer.take(str(key), value, f"{path}: {key}")
    return layer


def _is_option(key: str) -> bool:
    """Whether a key that holds a mapping is an option with an object for its value, or one of another tool,
    and no section."""
    known, plain = look_up(key), normalise(key)
    if plain in GROUPS or (known.option is None and plain.removesuffix("s") in GROUPS):
        return False
    return any((known.option, known.moot, known.refused))


def _take_section(layer: Layer, path: str, section: str, options: Mapping[Any, Any]) -> None:
    if normalise(section) not in GROUPS:
        layer.problems.append(_unknown_section(path, section))
        return
    for key, value in options.items():
        layer.take(str(key), value, f"{path}: {section}.{key}")


def _words(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return tr("line {line}: {problem}", line=error.problem_mark.line + 1, problem=error.problem)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def _mend(path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        directory = shlex.quote(os.path.dirname(path) or ".")
        return tr("`ls {directory}` shows what is there", directory=directory)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return tr(
            "correct line {line}: each line has the form `num_generations: 8`, and each option appears once",
            line=error.problem_mark.line + 1,
        )
    return tr("use a file with lines such as `num_generations: 8`")


def _unreadable(path: str, words: str, mend: str) -> Problem:
    return Problem(
        code="E107",
        option=tr("config file"),
        seen=tr("{path} cannot be read as a configuration file: {words}.", path=path, words=words),
        why=tr("The options in the file cannot be used."),
        fixes=(Fix(text=mend), Fix(text=tr("give the options on the command line"))),
    )


def _unknown_section(path: str, section: str) -> Problem:
    near = nearest_group(section)
    listing = Fix(
        text=tr(
            "the sections are {groups}; options may also stand outside of sections",
            groups=joined(", ", GROUPS),
        )
    )
    return Problem(
        code="E101",
        option=section,
        seen=tr(
            "{path} has a section {section}, but a configuration has no such section.",
            path=path,
            section=section,
        ),
        why=tr("If the section were ignored, the run would not use the values in it."),
        cause=tr("The section belongs to another tool, or its name is misspelled."),
        fixes=(Fix(text=tr("the nearest section is {near}", near=near)), listing) if near else (listing,),
    )
