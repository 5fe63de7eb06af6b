"""Stand-ins for the modules of ms-swift that plugin files import, for machines without ms-swift.

They offer what a reward needs (ORM, AsyncORM, orms, get_logger). Whatever else a plugin file imports can be
imported, subclassed and named in annotations, and says what it is when it is used.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from os.path import isdir
from pathlib import Path
from types import ModuleType
from typing import Any

from covey.rewards.builtin import BUILT_IN
from covey.rewards.callee import wants_of
from covey.rewards.declare import BuiltIn
from covey.texts import tr

_HOMES = ("swift.rewards", "swift.plugin")
# What ms-swift has below its packages of rewards; another name there is a misspelt one.
_PARTS = ("orm", "prm", "rm_plugin", "multi_turn", "env", "context_manager", "loss", "metric", "callback")
_REGISTRIES = ("rm_plugins", "prms", "envs", "multi_turns", "context_managers")


def is_installed() -> bool:
    """Whether ms-swift itself can be imported; other distributions have a package `swift` too."""
    spec = importlib.util.find_spec("swift")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(isdir(Path(f) / part) for f in folders for part in ("rewards", "plugin"))


def is_orm(reward: Any) -> bool:
    """Whether an object is of a class of rewards of ms-swift, its own or the stand-ins below."""
    bases = [(base.__module__.partition(".")[0], base.__name__) for base in type(reward).__mro__]
    return ("swift", "ORM") in bases or ("swift", "AsyncORM") in bases


def install() -> None:
    """Let `import swift` and everything below it find the stand-ins."""
    sys.meta_path.insert(0, _Finder())


def offer(names: Mapping[str, Any]) -> None:
    """Have the stand-ins, where they are installed, offer more by name."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.offers.update(names)


class ORM:
    """Base class of a reward."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:
        raise NotImplementedError(tr("{name} has no __call__", name=type(self).__name__))


class AsyncORM:
    """Base class of a reward whose `__call__` is a coroutine."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:
        raise NotImplementedError(tr("{name} has no __call__", name=type(self).__name__))


def _orm_of(name: str, built_in: BuiltIn) -> type[ORM]:
    """A built-in as a class of ms-swift, which takes the run's options from its `args`."""

    wants = wants_of(built_in.function)

    def call(
        self: ORM, completions: Sequence[str], solution: Any = None, **kwargs: Any
    ) -> list[float | None]:
        values = {"completion_ids": kwargs.get("response_token_ids"), **kwargs}
        values |= {"completions": completions, "solution": solution}
        for option in built_in.options:
            # Without `args`, as a class of a plugin makes it, the options that it needs are an error.
            default = () if option in wants.demands else (None,)
            values[option] = getattr(self.args, option, *default)
        return built_in.function(**{n: values[n] for n in wants.names if n in values})

    return type(name, (ORM,), {"__call__": call, "__doc__": built_in.function.__doc__})


_CLASSES = {
    "MathAccuracy": "accuracy",
    "Format": "format",
    "ReActFormat": "react_format",
    "CosineReward": "cosine",
    "RepetitionPenalty": "repetition",
    "SoftOverlong": "soft_overlong",
    "ReactORM": "toolbench",
}
_ORMS = {built_in: _orm_of(name, BUILT_IN[built_in]) for name, built_in in _CLASSES.items()}


def orm(name: str) -> type[ORM]:
    """Return the class of a built-in reward: `orm("accuracy")` is MathAccuracy."""
    return _ORMS[name]


for _class in (ORM, AsyncORM, *_ORMS.values()):
    _class.__module__ = "swift.rewards"


def _get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """A logger that writes to standard error from INFO on, as ms-swift's does."""
    logger = logging.getLogger("swift")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s:swift] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


class _Finder:
    """Makes a stand-in for every module of `swift`; the modules share one set of registries."""

    def __init__(self) -> None:
        self.offers: dict[str, Any] = {name: {} for name in _REGISTRIES}
        self.offers["orms"] = dict(_ORMS)
        self.offers.update(ORM=ORM, AsyncORM=AsyncORM, **{c.__name__: c for c in _ORMS.values()})

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        if name != "swift" and not name.startswith("swift."):
            return None
        if parent in _HOMES and last not in _PARTS:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        vars(module).update(self.offers)
        if spec.name == "swift.utils":
            vars(module)["get_logger"] = _get_logger
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module that has any name of ms-swift: classes and functions that say what they are when used."""

    def __getattr__(self, name: str) -> Any:
        words = tr(
            "{name}.{attribute} is part of ms-swift: install ms-swift to use it (pip install ms-swift)",
            name=self.__name__,
            attribute=name,
        )
        if name.startswith("__"):
            raise AttributeError(tr("{name} has no {attribute}", name=self.__name__, attribute=name))
        if name[0].isupper():
            vars(self)[name] = _class_named(name, self.__name__, words)
        elif self.__name__ == "swift" or name in _PARTS:
            # The import system takes this for "no such name" and looks for a module of it.
            raise AttributeError(tr("{name} has no {attribute}", name=self.__name__, attribute=name))
        elif self.__name__.startswith(_HOMES):
            raise ImportError(
                tr(
                    "{name} has no {attribute} in covey: {words}",
                    name=self.__name__,
                    attribute=name,
                    words=words,
                ),
                name=self.__name__,
            )
        else:
            vars(self)[name] = _function_named(words)
        return vars(self)[name]


class _Meta(type):
    """The type of classes that are there by name alone."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(cls._words if not name.startswith("_") else name)


def _class_named(name: str, module: str, words: str) -> type:
    def use(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(words)

    return _Meta(name, (), {"__init__": use, "__module__": module, "_words": words})


def _function_named(words: str) -> Any:
    def use(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(words)

    return use
