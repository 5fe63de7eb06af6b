"""A model's files written by every rank, as from_pretrained reads them.

Tensors are dealt out to the ranks by bytes, as they come; each rank writes one file of its own, and the first
rank the index and the configuration. Names and shapes in the files are those that the model was published
with: what transformers joins while it loads, such as the experts of a layer, is taken apart again.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.tensor_file import write_tensors, write_text
from covey.weight_files import INDEX, WHOLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LAYER = re.compile(r"^.*?\.\d+\.")


class ModelFiles:
    """This rank's share of a model's tensors, until it is written.

    Every rank calls `add` with the same names in the same order, and then `write`, which has no collective.
    """

    def __init__(self, model: Any, rank: int = 0, world: int = 1) -> None:
        self._model, self._rank = model, rank
        # What each rank writes, without the bytes.
        self._listed: list[dict[str, Tensor]] = [{} for _ in range(world)]
        self._bytes = [0] * world
        self._own: dict[str, Tensor] = {}
        self._owners: dict[str, int] = {}
        self._groups = _converted_together(model)

    def add(self, name: str, tensor: Tensor, *, stays: bool = False) -> None:
        """Take a whole tensor under transformers' name; where it is this rank's share it is kept, on the CPU.

        `stays`: the tensor stays as it is until `write`, so that it need not be copied off its device.
        """
        key = self._groups.get(name, name)
        owner = self._owners.setdefault(key, self._bytes.index(min(self._bytes)))
        self._bytes[owner] += tensor.numel() * tensor.element_size()
        self._listed[owner][name] = tensor.detach().to("meta")
        if owner == self._rank:
            self._own[name] = tensor.detach() if stays else tensor.detach().to("cpu", copy=True)

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> ModelFiles:
        """Take tensors that every rank holds, and that stay as they are until `write`."""
        for name, tensor in tensors:
            self.add(name, tensor, stays=True)
        return self

    def write(self, directory: Path) -> dict[str, FileEntry]:
        """Write this rank's file, and on the first rank the index and the configuration; returns the sums of
        what holds tensors."""
        for name, buffer in _buffers(self._model).items():
            self.add(name, buffer, stays=True)
        writers = [rank for rank, listed in enumerate(self._listed) if listed]
        files = {rank: _file_name(i, len(writers)) for i, rank in enumerate(writers)}
        entries = {}
        if self._own:
            own = _as_published(self._model, self._own)
            file = files[self._rank]
            entries[file] = write_tensors(directory / file, own)
        if self._rank == 0:
            _write_config(self._model, directory, self._dtype())
            if len(files) > 1:
                entries[INDEX] = write_text(directory / INDEX, self._index(files))
        return entries

    def _index(self, files: Mapping[int, str]) -> str:
        weight_map, total = {}, 0
        for rank, file in files.items():
            for name, tensor in _as_published(self._model, self._listed[rank]).items():
                weight_map[name] = file
                total += tensor.numel() * tensor.element_size()
        body = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(body, indent=2, sort_keys=True) + "\n"

    def _dtype(self) -> torch.dtype:
        """The dtype of most of the model."""
        sizes: Counter[torch.dtype] = Counter()
        for listed in self._listed:
            for tensor in listed.values():
                sizes[tensor.dtype] += tensor.numel()
        return sizes.most_common(1)[0][0]


def _file_name(index: int, count: int) -> str:
    return WHOLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _buffers(model: Any) -> dict[str, Tensor]:
    """What a model's files hold beside its parameters; every rank has it whole."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names = set(model.state_dict()) - parameters - ignored
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _write_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """What save_pretrained writes beside the weights."""
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    # A sharded model has the name of its class with a prefix.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def _as_published(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names and in the shapes of the model's own files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))  # type: ignore[no-any-return]


def _converted_together(model: Any) -> dict[str, str]:
    """A name for each group of tensors that become files' tensors only together, by the names of the model's.

    Most tensors are in none: they keep their names, or each is taken apart by itself.
    """
    import torch

    named = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in model.named_parameters()}
    every = _shapes(_as_published(model, named))
    if every == _shapes(named):
        return {}

    def is_whole(names: Iterable[str]) -> bool:
        try:
            found = _shapes(_as_published(model, {name: named[name] for name in names}))
        # A conversion that lacks a part may fail in any way.
        except Exception:  # noqa: BLE001
            return False
        return bool(found) and found.items() <= every.items()

    groups: dict[str, list[str]] = {}
    for name in named:
        if not is_whole([name]):
            layer = _LAYER.match(name)
            groups.setdefault(layer[0] if layer else "", []).append(name)
    if all(is_whole(names) for names in groups.values()):
        return {name: group for group, names in groups.items() for name in names}
    return {name: "" for names in groups.values() for name in names}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
