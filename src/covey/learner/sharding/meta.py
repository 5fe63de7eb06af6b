"""Models that are built without weights: parameters on the meta device, buffers as they are computed.

Rotary frequencies and scales of embeddings are buffers that no file holds, so they are computed for real;
those that a file holds are read. A parameter is allocated as its layer is made, and let go before it is
written to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from covey.media.families import auto_class
from covey.models.adapter_shapes import LoraSettings
from covey.models.lora import add_adapter, load_adapter
from covey.models.policy import Policy
from covey.types.media import Part
from covey.weight_files import stored_tensors


def meta_model(source: Path | nn.Module, trust_remote_code: bool) -> nn.Module:
    """Return the model of a directory, or a copy of one that is loaded, without weights; errors are
    transformers' own."""
    if isinstance(source, nn.Module):
        memo: dict[int, Any] = {id(p): _meta_parameter(p) for p in source.parameters()}
        return copy.deepcopy(source, memo)
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(source, **how)
    auto: Any = getattr(transformers, auto_class(config.model_type))
    with _on_meta():
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    read_buffers(model, source)
    if isfile(source / "generation_config.json"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def add_meta_adapter(
    policy: Policy, lora: LoraSettings, *, adapter: Path | None, seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Put a new adapter, or the saved one of the directory `adapter`, on a policy without weights, whose base
    becomes `dtype`.

    Return the values that the adapter starts with, the same as on a whole model. Tensors that are computed
    from the base's weights (DoRA's magnitudes, whole copies) are not among them unless they were saved.
    """
    # One number stands for all of a tensor, so that peft makes the adapter on the CPU.
    _replace(policy.model, lambda p: nn.Parameter(torch.zeros(()).expand(p.shape), p.requires_grad))
    add_adapter(policy, lora, seed=seed)
    if adapter is not None:
        _replace(policy.model, lambda p: nn.Parameter(p.contiguous()) if p.requires_grad else p)
        load_adapter(policy, adapter)
    saved = {n: p.detach() for n, p in policy.named_parameters() if p.requires_grad}
    values = {n: t for n, t in saved.items() if adapter is not None or is_drawn(n)}
    _replace(policy.model, lambda p: _meta_parameter(p, torch.float32 if p.requires_grad else dtype))
    return values


@torch.no_grad()
def freeze_meta(policy: Policy, parts: Collection[Part], dtype: torch.dtype) -> None:
    """Freeze parts of a policy without weights, which become `dtype`; what is trained stays float32."""
    policy.freeze(parts)
    _replace(policy.model, lambda p: p if p.requires_grad else _meta_parameter(p, dtype))


def is_drawn(name: str) -> bool:
    """Whether a tensor of a new adapter starts from random numbers or zeros, whatever the base is."""
    return ".lora_" in name and "magnitude" not in name


@torch.no_grad()
def read_buffers(model: Any, source: Path) -> None:
    """Give the buffers that a model is saved with what its files have for them, such as the biases of a
    router."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers, stored = dict(model.named_buffers()), stored_tensors(source)
    prefix = f"{model.base_model_prefix}."
    for name in set(model.state_dict()) & buffers.keys() - parameters:
        key = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None)
        if key is not None:
            with safe_open(stored[key].file, framework="pt") as file:
                buffers[name].copy_(file.get_tensor(key))


@contextmanager
def _on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers is on the meta device."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None or param.is_meta else _meta_parameter(param))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _meta_parameter(parameter: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _replace(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put another parameter in the place of each, one for all modules that share it."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _, new = made.setdefault(id(parameter), (parameter, make(parameter)))
                module._parameters[name] = new
