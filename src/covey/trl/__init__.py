"""The names that a training script of TRL imports: `from covey.trl import GRPOConfig, GRPOTrainer`.

Each is loaded when it is asked for, so importing covey.trl imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.trl.config import GRPOConfig as GRPOConfig
    from covey.trl.model_config import ModelConfig as ModelConfig
    from covey.trl.model_config import get_kbit_device_map as get_kbit_device_map
    from covey.trl.model_config import get_peft_config as get_peft_config
    from covey.trl.model_config import get_quantization_config as get_quantization_config
    from covey.trl.parser import TrlParser as TrlParser
    from covey.trl.script import DatasetConfig as DatasetConfig
    from covey.trl.script import DatasetMixtureConfig as DatasetMixtureConfig
    from covey.trl.script import RichProgressCallback as RichProgressCallback
    from covey.trl.script import ScriptArguments as ScriptArguments
    from covey.trl.script import get_dataset as get_dataset
    from covey.trl.script import is_conversational as is_conversational
    from covey.trl.state import TrainerControl as TrainerControl
    from covey.trl.state import TrainerState as TrainerState
    from covey.trl.trainer import GRPOTrainer as GRPOTrainer

_MODULES = {
    "config": ("GRPOConfig",),
    "model_config": ("ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
    "parser": ("TrlParser",),
    "trainer": ("GRPOTrainer",),
    "state": ("TrainerControl", "TrainerState"),
    "script": (
        *("DatasetConfig", "DatasetMixtureConfig", "RichProgressCallback", "ScriptArguments"),
        *("get_dataset", "is_conversational"),
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
