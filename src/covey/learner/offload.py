"""Tensors that wait in CPU memory while nothing on the device needs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from covey.options.schema import LearnerOptions
from covey.plan.layout import Layout

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


def own_offloads(options: LearnerOptions, layout: Layout) -> LearnerOptions:
    """Return the options with no offload of what is in CPU memory already, or is DeepSpeed's to move."""
    is_there = (layout.fsdp and layout.offload == "params") or layout.by_deepspeed
    off = ["offload_optimizer", "offload_model"] if is_there else []
    off += ["offload_reference"] if layout.by_deepspeed else []
    return options.model_copy(update=dict.fromkeys(off, False))


class Offloaded:
    """Holds tensors that move between their device and CPU memory, bit for bit.

    A tensor stays the object that it is, and so do all views of it: the storage behind them is emptied, and
    filled again in other memory. While they are in CPU memory, only `read` may read them.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._tensors = tensors
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._is_changed = False
        self.is_on_cpu = False

    @torch.no_grad()
    def to_cpu(self, *, is_changed: bool = True) -> None:
        """Free the tensors' memory on the device. Tensors that may have changed (`is_changed`), or have no
        copy in CPU memory yet, are copied first."""
        assert not self.is_on_cpu, "the tensors are in CPU memory"
        found = {t.untyped_storage()._cdata: t for t in self._tensors()}
        self._copies = {key: copy for key, copy in self._copies.items() if key in found}
        on_gpu = any(t.is_cuda for t in found.values())
        for key, tensor in found.items():
            storage = tensor.untyped_storage()
            if key not in self._copies:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                self._copies[key] = storage, copy
            elif not (is_changed or self._is_changed):
                continue
            self._copies[key][1].copy_(_as_bytes(storage), non_blocking=True)
        if on_gpu:
            # The copies are read by the CPU from now on.
            torch.cuda.synchronize()
        for storage, _ in self._copies.values():
            storage.resize_(0)
        self.is_on_cpu, self._is_changed = True, False

    @torch.no_grad()
    def to_device(self) -> None:
        """Copy the tensors back to their device."""
        for storage, copy in self._copies.values():
            storage.resize_(copy.numel())
            _as_bytes(storage).copy_(copy, non_blocking=True)
        self.is_on_cpu = False

    @contextmanager
    def on_device(self, *, is_changed: bool = True) -> Iterator[None]:
        """Within it, the tensors are on their device; if they were in CPU memory, they go back there."""
        was_away = self.is_on_cpu
        if was_away:
            self.to_device()
        self._is_changed = self._is_changed or is_changed
        try:
            yield
        finally:
            if was_away:
                self.to_cpu(is_changed=False)

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Within it, the tensors are in CPU memory, and nothing changes them."""
        was_away = self.is_on_cpu
        if not was_away:
            self.to_cpu()
        try:
            yield
        finally:
            if not was_away:
                self.to_device()

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor where it lies now: itself, or its copy in CPU memory."""
        found = self._copies.get(tensor.untyped_storage()._cdata) if self.is_on_cpu else None
        if found is None:
            return tensor.detach()
        own = torch.empty(0, dtype=tensor.dtype)
        return own.set_(found[1].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def own_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Copy parameters that lie in a file mapped into memory, or in an array of numpy's: such memory cannot be
    let go of."""
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def layer_groups(names: Sequence[str], num_groups: int | None) -> list[list[int]]:
    """The places of tensors in groups that are moved together, in their order.

    The layers of a model make `num_groups` groups, as equal as can be, or one each; what belongs to no layer,
    such as an embedding or a head, is a group of its own.
    """
    layers = sorted({int(found[1]) for name in names if (found := _LAYER.search(name))})
    size = -(-len(layers) // num_groups) if num_groups else 1
    group_of_layer = {layer: number // max(1, size) for number, layer in enumerate(layers)}
    groups: dict[object, list[int]] = {}
    for place, name in enumerate(names):
        found = _LAYER.search(name)
        key = name if found is None else group_of_layer[int(found[1])]
        groups.setdefault(key, []).append(place)
    return list(groups.values())
