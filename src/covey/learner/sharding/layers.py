"""The decoder layers of a model, and the model cut down to two of them.

What is proven of a layer holds for all layers of its kind: those of equal modules, shapes and options. A
model that is split over ranks is probed so, since no rank may hold all of it. One layer is not enough: what
leaks into the first tokens of a row reaches the others in the layer that comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from covey.models.load import Attention, choose_stream
from covey.models.policy import Policy, RowLayout


def decoder_layers(policy: Policy) -> dict[str, nn.Module]:
    """Return the layers of a model by their names in the policy: the largest list of modules in it, but for
    those that see images."""
    name, layers = _layer_list(policy)
    return {f"{name}.{number}": layer for number, layer in enumerate(layers)}


def pairs_of_layers(policy: Policy) -> list[tuple[int, ...]]:
    """Return the numbers of two layers for each kind and each kind that may come after it, itself among them;
    of a model with one layer, that one."""
    kinds = list(_layers_by_kind(policy).values())
    if sum(map(len, kinds)) == 1:
        return [(0,)]
    # Of a kind with one layer nothing is its own next.
    return [(a[0], b[0] if a is not b else b[1]) for a in kinds for b in kinds if a is not b or len(b) > 1]


def layout_of_layers(policy: Policy, numbers: Sequence[int], attention: Attention) -> RowLayout:
    """Return the layout that the layers of these numbers pass the probe with, which the policy is on then:
    rows of their own for layers that cannot run without others, since those need no proof."""
    share = len(numbers) / len(_layer_list(policy)[1])
    with _only_layers(policy, numbers):
        try:
            choose_stream(policy, attention, share)
        except torch.OutOfMemoryError:
            raise
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            # Such as layers that attend to the keys and values of an earlier one.
            policy.use_stream("padded")
    return policy.layout


def _layers_by_kind(policy: Policy) -> dict[Any, list[int]]:
    _, layers = _layer_list(policy)
    found: dict[Any, list[int]] = {}
    options = [_options(layer) for layer in layers]
    known = {key for own in options for key in own}
    numbers = {
        key for key in known if _counts_layers({n: own[key] for n, own in enumerate(options) if key in own})
    }
    for number, layer in enumerate(layers):
        kind = (
            tuple((path, type(module)) for path, module in layer.named_modules()),
            tuple((path, tuple(p.shape)) for path, p in layer.named_parameters()),
            frozenset((key, value) for key, value in options[number].items() if key not in numbers),
            tuple(repr(values[number]) for _, _, values in _lists_by_layer(policy, len(layers))),
        )
        found.setdefault(kind, []).append(number)
    return found


@contextmanager
def _only_layers(policy: Policy, numbers: Sequence[int]) -> Iterator[None]:
    """Within it, the model has only its layers of these numbers, in this order."""
    name, layers = _layer_list(policy)
    parent, _, own = name.rpartition(".")
    holder = policy.get_submodule(parent)
    changed: list[tuple[Any, str, Any]] = []
    for config, option, values in _lists_by_layer(policy, len(layers)):
        changed.append((config, option, [values[number] for number in numbers]))
    changed += [(config, "num_hidden_layers", len(numbers)) for config in _configs(policy, len(layers))]
    before = [(config, option, getattr(config, option)) for config, option, _ in changed]
    holder._modules[own] = nn.ModuleList([layers[number] for number in numbers])
    try:
        for config, option, value in changed:
            setattr(config, option, value)
        yield
    finally:
        holder._modules[own] = layers
        for config, option, value in before:
            setattr(config, option, value)


def _layer_list(policy: Policy) -> tuple[str, nn.ModuleList]:
    towers = [] if policy.vision is None else policy.vision.towers(policy.model)
    seeing = {module for tower in towers for module in tower.modules()}
    lists = [
        (n, m)
        for n, m in policy.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) and m not in seeing
    ]
    if not lists:
        return "", nn.ModuleList()
    return max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))


def _options(layer: nn.Module) -> dict[tuple[str, str], bool | int | str | None]:
    """Return the plain attributes of a layer's modules, such as the width of its attention's window."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is None or isinstance(value, bool | int | str))
    }


def _counts_layers(values: Mapping[int, Any]) -> bool:
    """Whether an option of these layers, by their numbers, is the layers' own number."""
    if not all(type(value) is int for value in values.values()):
        return False
    return len({value - number for number, value in values.items()}) == 1 and len(values) > 1


def _configs(policy: Policy, num_layers: int) -> list[Any]:
    """Return the configurations in the model that say how many of these layers there are."""
    found = {id(m.config): m.config for m in policy.modules() if hasattr(m, "config")}
    return [c for c in found.values() if getattr(c, "num_hidden_layers", None) == num_layers]


def _lists_by_layer(policy: Policy, num_layers: int) -> list[tuple[Any, str, list[Any]]]:
    """Return the options of configurations that have a value for each layer: configuration, name and
    values."""
    return [
        (config, option, value)
        for config in _configs(policy, num_layers)
        for option, value in vars(config).items()
        if isinstance(value, list) and len(value) == num_layers
    ]
