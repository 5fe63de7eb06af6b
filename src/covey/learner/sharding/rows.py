"""Where the weights of a sharded policy come from: rows of tensors, read as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from covey.checkpoint.shards import SavedShards
from covey.weight_files import stored_tensors

# Reads rows of a parameter, by its name, the first row and the last; None where nothing is known of it.
ReadRows = Callable[[str, int, int], "Tensor | None"]


def rows_of(tensor: Tensor, first: int, last: int) -> Tensor:
    """Return rows of a tensor in memory, as a view; all of it where it has no dimension."""
    return tensor.detach()[first:last] if tensor.dim() else tensor.detach()


class FileRows:
    """Reads rows of a model's files, which stay open; `keys` are the names of the tensors in the files."""

    def __init__(self, directory: Path, keys: Mapping[str, str]) -> None:
        self._stored, self._keys = stored_tensors(directory), keys
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Return the rows alone, in the dtype of the file."""
        key = self._keys[name]
        file, shape = self._stored[key].file, self._stored[key].shape
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        part = self._files[file].get_slice(key)
        return part[first:last] if shape else self._files[file].get_tensor(key)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


def file_keys(model: nn.Module, directory: Path) -> dict[str, str] | None:
    """Return the key in the files of each parameter of a model without weights, by its name; None where the
    files hold something else than the model's own tensors, such as experts one by one."""
    stored = stored_tensors(directory)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    keys: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        aliases = names[id(parameter)]
        spelled = [*aliases, *(a.removeprefix(prefix) for a in aliases), *(prefix + a for a in aliases)]
        found = [a for a in spelled if a in stored and stored[a].shape == tuple(parameter.shape)]
        if not found:
            return None
        keys[name] = found[0]
    return keys


def parameter_of(key: str) -> str:
    """Return the parameter that a saved tensor, NAME or `KIND/NAME`, belongs to."""
    return key.rpartition("/")[2]


class OwnParts(Mapping[str, Tensor]):
    """Reads this rank's parts of saved tensors when they are asked for; `read` reads the part of a tensor
    with dimensions."""

    def __init__(self, saved: SavedShards, read: Callable[[str], Tensor]) -> None:
        self._saved, self._read = saved, read

    def __getitem__(self, key: str) -> Tensor:
        """Return the part of a tensor; all of one without dimensions."""
        return self._read(key) if self._saved.shape(key) else self._saved[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)
