"""Where a reward's function is: what an entry of `reward_funcs`, typed or a Python callable, stands for."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os.path import expanduser, isfile
from pathlib import Path
from typing import Any, TypeVar

from covey.texts import tr

_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+(?:\.\w+)*)")
_COLON = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<name>\w+(?:\.\w+)*)")
_HUBS = ("hf::", "ms::")
_DOTTED = re.compile(r"(?P<module>\w+(?:\.\w+)*)\.(?P<name>\w+)")
_BUILT_IN = "built_in_reward"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function or class that a worker can find: `name` in a file, in a module (which is tried first), or,
    with neither, in the registry `orms` that plugin files fill."""

    entry: str
    name: str
    module: str | None = None
    file: str | None = None

    @property
    def metric(self) -> str:
        """The name under which its scores are recorded."""
        return self.name.rsplit(".", 1)[-1] if self.module or self.file else self.name

    @property
    def source(self) -> str:
        """What tells it from a function of the same name: the module's last name, or that of the file."""
        return (self.module or Path(self.file or "orms").stem).rsplit(".", 1)[-1]


def target_of(entry: str) -> Target | None:
    """The target of `FILE.py:name`, `package.module:name` or `package.module.name`; else None."""
    if match := _FILE.fullmatch(entry):
        file = Path(expanduser(match["file"])).absolute()
        return Target(entry=entry, name=match["name"], file=str(file))
    if match := _COLON.fullmatch(entry) or _DOTTED.fullmatch(entry):
        if match["name"] == "py":
            return None
        return Target(entry=entry, name=match["name"], module=match["module"])
    return None


def is_model(entry: str) -> bool:
    """Whether an entry that is no built-in is a model: a directory with a config.json, or as an id on a hub
    is written, `owner/name`."""
    if target_of(entry) is not None or entry.endswith(".py"):
        return False
    is_directory = isfile(Path(expanduser(entry)) / "config.json")
    return is_directory or "/" in entry or entry.startswith(_HUBS)


def model_name(entry: str) -> str:
    """The last part of a model's path or id: `model_name("ms::me/tiny-rm")` is "tiny-rm"."""
    return _place(entry).name or entry


def model_source(entry: str) -> str | None:
    """What tells a model from another of its name: its owner on a hub, or the directory that it lies in."""
    return _place(entry).parent.name or None


def _place(entry: str) -> Path:
    return Path(expanduser(entry.rpartition("::")[2]))


def target_of_callable(function: Callable[..., Any]) -> Target | str:
    """Where a worker finds a Python callable; or, in words, why only this process can call it."""
    name = getattr(function, "__qualname__", None)
    if name is None or inspect.ismethod(function):
        return tr("it is an object or a method of one, not a function of a module")
    if "<" in name:
        return tr("it is not defined at the top level of a module (a lambda or a nested function)")
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is None or _lookup(module, name) is not function:
        return tr("{module} has a different object under this name", module=function.__module__)
    if file is None or not file.endswith(".py"):
        return tr("it was defined in a notebook or an interactive session, so no file contains it")
    # A worker imports the file: a script that trains as soon as it is imported would start over in there.
    if function.__module__ == "__main__" and not _has_guard(Path(file)):
        return tr('its script does not put the training under `if __name__ == "__main__":`')
    dotted = module.__name__ if module.__name__ != "__main__" and module.__package__ else None
    return Target(entry=callable_name(function), name=name, module=dotted, file=str(Path(file).absolute()))


def means_built_in(function: _Function) -> _Function:
    """Mark a function that computes what the built-in reward of its name does."""
    function.__dict__[_BUILT_IN] = function.__name__
    return function


def built_in_meant(function: Any) -> str | None:
    """The built-in reward that a function is marked to mean; None for any other."""
    return getattr(function, _BUILT_IN, None)


def callable_name(function: Callable[..., Any]) -> str:
    """`<lambda>` is `lambda`, an object is called as its class, and a partial as its function."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name.strip("<>")


def _lookup(module: Any, name: str) -> Any:
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _has_guard(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    tests = (node.test for node in tree.body if isinstance(node, ast.If))
    return any("'__name__'" in ast.dump(test) for test in tests)
