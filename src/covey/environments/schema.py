"""A function as a tool: its schema, and the arguments that a model wrote, made to fit its type hints."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from covey.environments.protocol import Schema, ToolFault
from covey.errors import CoveyError
from covey.texts import tr

_DESCRIPTION = "no description for the argument '(?P<name>.+)'"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LONGEST = 300


class Unusable(CoveyError):
    """Says why a function cannot be a tool."""

    def __init__(self, fault: ToolFault) -> None:
        self.fault = fault
        super().__init__(fault.words)


class BadArguments(CoveyError):
    """Says to the model why its arguments do not fit a function."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Holds pydantic's adapter of a parameter's type hint, and whether it must be given."""

    adapter: Any
    is_required: bool


class Signature:
    """Knows what a function can be called with."""

    def __init__(self, name: str, parameters: Mapping[str, Parameter]) -> None:
        self._name = name
        self._parameters = parameters

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Return the signature of a function that has a schema."""
        from pydantic import ConfigDict, TypeAdapter

        hints = get_type_hints(function, include_extras=True)
        config = ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True)
        parameters = {
            name: Parameter(TypeAdapter(hints[name], config=config), p.default is p.empty)
            for name, p in inspect.signature(function).parameters.items()
        }
        return cls(function.__name__, parameters)

    def fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the type hints want them: `{"n": "3"}` is `{"n": 3}` for `n: int`, since
        one format of calls has text alone. BadArguments where they do not fit."""
        known = self._parameters
        for name in arguments:
            if name not in known:
                names = ", ".join(known) or "none"
                raise BadArguments(
                    f"{self._name}() takes no argument {name[:80]!r}; its arguments are: {names}"
                )
        for name, parameter in known.items():
            if parameter.is_required and name not in arguments:
                raise BadArguments(f"{self._name}() got no argument {name!r}")
        return {name: self._fitted(name, value) for name, value in arguments.items()}

    def _fitted(self, name: str, value: Any) -> Any:
        from pydantic import ValidationError

        adapter = self._parameters[name].adapter
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            first = error
        try:
            return adapter.validate_python(json.loads(value))
        except (TypeError, ValueError, RecursionError):
            # Not text, not JSON, or JSON that does not fit either (pydantic's error is a ValueError).
            pass
        message = first.errors(include_url=False, include_context=False)[0]["msg"]
        raise BadArguments(f"{self._name}(): argument {name!r}: {message[:_LONGEST]}; it was {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema of a function or a bound method, sync or async, out of its type hints and its
    docstring in Google's style, as transformers makes it; Unusable, with its fault, where it has none."""
    from transformers.utils import chat_template_utils as hub

    name = getattr(function, "__name__", None)
    if name is None or not callable(function) or inspect.isclass(function):
        words = tr("{what} is neither a function nor a method", what=name or type(function).__name__)
        raise _unusable(name or type(function).__name__, "signature", words)
    _check_parameters(function, name)
    try:
        with _NoTorch(hub):
            return dict(hub.get_json_schema(function))
    except hub.DocstringParsingException as error:
        raise _no_docstring(name, str(error)) from error
    except hub.TypeHintParsingException as error:
        words = tr("{name}(): {error!s:.300}", name=name, error=error)
        raise _unusable(name, "signature", words) from error
    except Exception as error:
        # Hints are users' code: a name that is not there, say.
        words = tr(
            "{name}(): its type hints cannot be read: {kind}: {error!s:.300}",
            name=name,
            kind=type(error).__name__,
            error=error,
        )
        raise _unusable(name, "signature", words) from error


def _check_parameters(function: Callable[..., Any], name: str) -> None:
    """Refuse parameters that no model can give by name, and hints that are missing: all of them at once."""
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind not in _BY_NAME:
            words = tr(
                "{name}(): the argument {argument} cannot be given by name", name=name, argument=str(p)
            )
            raise _unusable(name, "signature", words, (p.name,))
    without = tuple(p.name for p in parameters if p.annotation is p.empty)
    if without:
        words = tr(
            "{name}(): no type hint for {arguments}; write for instance `{first}: str`",
            name=name,
            arguments=", ".join(without),
            first=without[0],
        )
        raise _unusable(name, "no_hints", words, without)


def _no_docstring(name: str, error: str) -> Unusable:
    match = re.search(_DESCRIPTION, error)
    if match is None:
        words = tr("{name}() has no docstring, which tells the model what the tool does", name=name)
        return _unusable(name, "no_docstring", words)
    argument = match["name"]
    words = tr(
        "{name}(): its docstring does not describe the argument {argument}; write it under a line `Args:`, "
        "as `{argument}: what it is`",
        name=name,
        argument=argument,
    )
    return _unusable(name, "no_docstring", words, (argument,))


def _unusable(name: str, kind: str, words: str, lacking: tuple[str, ...] = ()) -> Unusable:
    return Unusable(ToolFault(entry=name, kind=kind, words=words, lacking=lacking))


class _NoTorch:
    """Keeps transformers from importing torch for the type hint `torch.Tensor`, which nobody can have written
    where torch is not imported: seconds, and 300 MB of every worker."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._asked = hub.is_torch_available

    def __enter__(self) -> None:
        if "torch" not in sys.modules:
            self._hub.is_torch_available = lambda: False

    def __exit__(self, *_: object) -> None:
        self._hub.is_torch_available = self._asked
