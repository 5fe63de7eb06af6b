"""Find the values that the modules of a package declare, so that a new file needs no entry elsewhere."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import TypeVar

Declared = TypeVar("Declared")


def values_in(package: ModuleType, kind: type[Declared]) -> list[Declared]:
    """Import every module of a package and return each value of a kind that a variable of them holds."""
    names = (f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__))
    return values_of(names, kind)


def values_of(modules: Iterable[str], kind: type[Declared]) -> list[Declared]:
    """Import these modules and return each value of a kind that a variable of them holds."""
    values = [value for name in modules for value in vars(import_module(name)).values()]
    return list(dict.fromkeys(value for value in values if isinstance(value, kind)))
