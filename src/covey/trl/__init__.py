"""The names that a training script of TRL imports: `from covey.trl import GRPOConfig, GRPOTrainer`.

Each is loaded when it is asked for, so importing covey.trl imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.trl.config import GRPOConfig as GRPOConfig

_MODULES = {
    "config": ("GRPOConfig",),
    "trainer": ("GRPOTrainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
