"""A safetensors file written tensor by tensor: each is on the CPU only while its bytes are written, and the
file's SHA-256 is that of the bytes on their way to the disk, so nothing is read back.

Other files of a checkpoint go the same way (`write_text`). A file is as long as its manifest says and on the
disk before its entry is returned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.manifest import FileEntry
from covey.errors import CheckpointError
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

# torch's names of the dtypes, and those of the file format.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Bytes that are hashed and written at a time.
_PORTION = 1 << 24


def write_text(path: Path, text: str) -> FileEntry:
    """Write a text and return its length and sum."""
    return _write(path, [text.encode()])


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write tensors of any device under their names and return the file's length and sum.

    The format is safetensors: the longest dtype first, so that every tensor lies at a multiple of its
    element's size (https://huggingface.co/docs/safetensors).
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return _write(path, [begin], (_bytes(tensor) for _, tensor in ordered))


def _dtype(name: str, tensor: Tensor) -> str:
    known = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if known is None or str(tensor.layout) != "torch.strided":
        raise CheckpointError(
            tr(
                "safetensors cannot store {name} ({dtype}, {layout})",
                name=name,
                dtype=tensor.dtype,
                layout=tensor.layout,
            )
        )
    return known


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write(path: Path, *parts: Iterable[bytes | memoryview]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:
            for part in (data for each in parts for data in each):
                for start in range(0, len(part), _PORTION):
                    portion = part[start : start + _PORTION]
                    file.write(portion)
                    digest.update(portion)
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk is told by the file that did not fit.
        error.filename = error.filename or str(path)
        raise
    return FileEntry(size=size, sha256=digest.hexdigest())
