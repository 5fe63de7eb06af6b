"""The safetensors files of a model: which of them are loaded, and what their headers say; reads no weights.

A file is a header's length in 8 bytes, the header as JSON with dtype, shape and place of each tensor, and the
bytes of the tensors one behind the other (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.texts import tr

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
}
# The longest header that the library reads.
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 20
_COMPARED = 4 * _CHUNK
_METADATA = "__metadata__"


class DamagedFileError(ValueError):
    """Raised where a file of weights is not what its header or its index says, in words."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Holds a tensor in a file: its dtype by safetensors' name, its shape, and its bytes from `start` to
    `end`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_map(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index; None where there is none, or one file holds the whole
    model.

    DamagedFileError where an index names no files.
    """
    index = directory / INDEX
    if isfile(directory / WHOLE) or not isfile(index):
        return None
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not names or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(tr("it lists no files"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(tr("{name} lists no weight files", name=index.name)) from error
    return dict(names)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that are loaded from a model's directory; none where there are none.

    DamagedFileError where an index names none.
    """
    if isfile(directory / WHOLE):
        return [directory / WHOLE]
    return [directory / name for name in sorted({*(weight_map(directory) or {}).values()})]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the files that are loaded, by name.

    DamagedFileError names the first file that is cut short or is no safetensors, and the first tensor that is
    not in the file where the index has it.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise DamagedFileError(
                    tr(
                        "{tensor} is in two files: {first} and {second}",
                        tensor=name,
                        first=tensors[name].file.name,
                        second=file.name,
                    )
                )
            tensors[name] = tensor
    for name, file_name in (weight_map(directory) or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            where = (
                tr("it is in {name}", name=tensors[name].file.name)
                if name in tensors
                else tr("it is not there")
            )
            raise DamagedFileError(
                tr(
                    "{index} says that {name} is in {file_name}, but {where}",
                    index=INDEX,
                    name=name,
                    file_name=file_name,
                    where=where,
                )
            )
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return what a file's header says; DamagedFileError where it does not fit the length of the file."""
    return read_file(file)[0]


def read_file(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return what `read_header` does, and the file's metadata, such as {"format": "pt"}."""
    size = file.stat().st_size
    header, begin = _header(file)
    metadata = header.pop(_METADATA, None) or {}
    try:
        tensors = {name: _tensor(file, entry, begin) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            tr("{name} has a header that cannot be read: {error!r}", name=file.name, error=error)
        ) from error
    needed = max((t.end for t in tensors.values()), default=begin)
    if needed != size:
        raise DamagedFileError(
            tr(
                "{name} is {size:,} bytes long, but its header describes {needed:,}",
                name=file.name,
                size=size,
                needed=needed,
            )
        )
    for name, tensor in tensors.items():
        bits = _BITS.get(tensor.dtype)
        if bits is not None and math.prod(tensor.shape) * bits != 8 * (tensor.end - tensor.start):
            raise DamagedFileError(
                tr(
                    "{tensor} takes {num_bytes:,} bytes in {file}, which is not the size of {dtype} of shape "
                    "{shape}",
                    tensor=name,
                    num_bytes=tensor.end - tensor.start,
                    file=file.name,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                )
            )
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError(
            tr("{name} has a header that cannot be read: its metadata values are not strings", name=file.name)
        )
    return tensors, metadata


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and where the bytes of its tensors begin."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER):
            raise DamagedFileError(
                tr("{name}, {size:,} bytes long, has no header", name=file.name, size=size)
            )
        content = stream.read(length)
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            tr("{name} has a header that cannot be read: {error!r}", name=file.name, error=error)
        ) from error
    if not isinstance(header, dict):
        raise DamagedFileError(
            tr("{name} has a header that cannot be read: it is not a JSON object", name=file.name)
        )
    return header, 8 + length


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors begin with the same few MiB and are of one size and dtype."""
    size = one.end - one.start
    if (one.dtype, one.shape, size) != (other.dtype, other.shape, other.end - other.start):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = min(size, _COMPARED)
        while left > 0:
            if first.read(min(left, _CHUNK)) != second.read(min(left, _CHUNK)):
                return False
            left -= _CHUNK
    return True


def _tensor(file: Path, entry: Mapping[str, Any], begin: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(side) for side in entry["shape"])
    if not 0 <= start <= end:
        raise ValueError(tr("a tensor that ends before it begins"))
    return StoredTensor(file, str(entry["dtype"]), shape, begin + start, begin + end)
