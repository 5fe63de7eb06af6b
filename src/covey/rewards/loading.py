"""In a worker: plugin files are run, and reward functions found in files, modules and the registry `orms`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from os.path import expanduser, isfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from covey.errors import CoveyError
from covey.rewards import swift_standin
from covey.rewards.builtin import BUILT_IN
from covey.rewards.callee import Callee, describe, file_of
from covey.rewards.targets import Target, callable_name
from covey.texts import joined, tr
from covey.types import FaultKind, RewardCause, RewardFault


class Unloadable(CoveyError):
    """A function that is not there or cannot be used; what it has beside its words is said of RewardFault."""

    def __init__(
        self, kind: FaultKind, words: str, *, cause: RewardCause = "", subject: str = "", near: str = ""
    ) -> None:
        self.kind, self.cause, self.subject, self.near = kind, cause, subject, near
        super().__init__(words)

    def of(self, reward: str) -> RewardFault:
        """The fault of the reward that it was raised for."""
        return RewardFault(
            reward=reward,
            kind=self.kind,
            words=str(self),
            cause=self.cause,
            subject=self.subject,
            near=self.near,
        )


class Loader:
    """Imports users' code, each file once."""

    def __init__(self, path: Sequence[str], options: Mapping[str, Any]) -> None:
        self._path = path
        self._options = options
        self._files: dict[Path, ModuleType] = {}

    def open(self) -> None:
        """Make importable what the parent can import, and `swift` where ms-swift is not installed."""
        sys.path.extend(p for p in self._path if p not in sys.path)
        if not swift_standin.is_installed():
            swift_standin.install()

    def run_plugin(self, file: str) -> None:
        """Run a plugin file."""
        self._file(Path(file))

    def orms(self) -> dict[str, Any]:
        """The registry that plugin files fill, by name; where ms-swift's own `accuracy` or `format` stands in
        it, covey's is meant."""
        named: dict[str, Any] = {}
        for module in [m for n, m in sys.modules.items() if n in ("swift.rewards", "swift.plugin")]:
            named.update(getattr(module, "orms", {}))
        return {n: f for n, f in named.items() if n not in BUILT_IN or not f.__module__.startswith("swift.")}

    def load(self, target: Target) -> tuple[Callee, bool]:
        """The target's function, or an object of its class, and whether it is one of ms-swift's form."""
        return callee_of(self.attribute(target), self._options)

    def attribute(self, target: Target) -> Any:
        """Return the object that a file, a module or the registry has under the target's name."""
        if target.module is None and target.file is None:
            return self.orms()[target.name]
        module = self._module(target)
        value: Any = module
        for part in target.name.split("."):
            if not hasattr(value, part):
                raise _missing(module, target)
            value = getattr(value, part)
        return value

    def _module(self, target: Target) -> ModuleType:
        if target.module is not None:
            try:
                return importlib.import_module(target.module)
            except ModuleNotFoundError as error:
                is_itself = error.name is not None and f"{target.module}.".startswith(f"{error.name}.")
                if target.file is None or not is_itself:
                    raise _import_fault(target.module, error, None) from error
            except (Exception, SystemExit) as error:
                raise _import_fault(target.module, error, None) from error
        return self._file(Path(str(target.file)))

    def _file(self, file: Path) -> ModuleType:
        file = Path(expanduser(file)).absolute()
        if file in self._files:
            return self._files[file]
        if not isfile(file):
            raise Unloadable("import", tr("the file {file} does not exist", file=file), cause="no_file")
        folder = str(file.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        name = file.stem
        while name in sys.modules:
            name += "_"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            words = tr("{file} is not imported: the name of a Python file ends in .py", file=file)
            raise Unloadable("import", words, cause="no_python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise _import_fault(file.name, error, str(file)) from error
        self._files[file] = module
        return module


def built(reward_class: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """An object of a reward class; one whose constructor names `args` is given the run's options."""
    try:
        names = inspect.signature(reward_class).parameters
        return reward_class(args=SimpleNamespace(**options)) if "args" in names else reward_class()
    except (Exception, SystemExit) as error:
        words = describe(error, file_of(reward_class))
        raise Unloadable(
            "import",
            tr(
                "no object of the class {name} could be created: {words}",
                name=reward_class.__name__,
                words=words,
            ),
            cause="no_module" if isinstance(error, ModuleNotFoundError) else "unmade",
            subject=reward_class.__name__,
        ) from error


def callee_of(reward: Any, options: Mapping[str, Any]) -> tuple[Callee, bool]:
    """How a function, or an object of a class, is called; and whether it is ms-swift's: a class, or an object
    of one of its base classes. Any other callable is called as TRL calls it."""
    name = callable_name(reward)
    is_orm = inspect.isclass(reward) or swift_standin.is_orm(reward)
    if inspect.isclass(reward):
        reward = built(reward, options)
    if not callable(reward):
        raise Unloadable(
            "not_callable",
            tr("{name} is neither a function nor a callable object", name=name),
            subject=name,
        )
    try:
        return Callee(reward), is_orm
    except TypeError as error:
        raise Unloadable("signature", tr("{name} {error}", name=name, error=error), subject=name) from error


def _import_fault(what: str, error: BaseException, file: str | None) -> Unloadable:
    return Unloadable(
        "import",
        tr("{what} cannot be imported: {describe}", what=what, describe=describe(error, file)),
        cause="no_module" if isinstance(error, ModuleNotFoundError) else "import",
        subject=what,
    )


def _missing(module: ModuleType, target: Target) -> Unloadable:
    # The configuration's schema takes longer to import than most workers take to start.
    from covey.config.names import nearest

    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    own = [n for n in names if getattr(vars(module)[n], "__module__", None) == module.__name__]
    near = nearest(target.name, names)
    hint = (
        tr("the nearest name is {near}", near=near)
        if near
        else tr("it defines {own}", own=joined(", ", own[:8]) or tr("no function"))
    )
    where = Path(target.file).name if target.file else str(target.module)
    words = tr("{name} does not define {attribute}; {hint}", name=where, attribute=target.name, hint=hint)
    return Unloadable("missing", words, subject=where, near=near or "")
