"""Where a model drops activations in training: modules, and rates that layers hold as plain numbers."""

from __future__ import annotations

from torch import nn


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules and attributes that hold a rate above 0."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if "dropout" in name or (name == "p" and isinstance(module, nn.Dropout))
        if isinstance(value, float) and value > 0.0
    ]


def silence(model: nn.Module) -> None:
    """Every rate to 0: on the modules, and not in the config, which a checkpoint keeps as the model's author
    wrote it."""
    for module, name in dropouts(model):
        setattr(module, name, 0.0)
