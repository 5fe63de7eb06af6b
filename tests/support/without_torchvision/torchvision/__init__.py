"""In the place of torchvision, whose builds do not fit every torch: modules in which every name is an empty
class.

vLLM's classes of models that see images import transformers' processors, which import torchvision. Where the
run sends pixels, and no image is processed at the start, none of it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class _AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyName(name, (), {})


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return __getattr__(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


sys.meta_path.append(_Finder())
