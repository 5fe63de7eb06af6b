"""Weights as safetensors files in memory, for vLLM's workers that are processes of their own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING

from covey.rollout.engine import NamedWeights
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of weights that are collected for one file.
_BUCKET = 512 << 20


def memory_directory() -> str | None:
    """Return where a file lies in memory; None for the usual place of temporary files."""
    shared = Path("/dev/shm")
    return str(shared) if isdir(shared) else None


def write_weights(weights: NamedWeights, directory: Path) -> None:
    """Write weights to safetensors files of about a bucket each, in the order in which they come. ValueError
    where they cannot be written, as on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    bucket: dict[str, Tensor] = {}
    size = count = 0

    def flush() -> None:
        nonlocal size, count
        try:
            if bucket:
                save_file(bucket, directory / f"{count:06d}.safetensors")
        except SafetensorError as error:
            raise ValueError(
                tr("{parent} takes no file of weights: {error}", parent=directory.parent, error=error)
            ) from error
        bucket.clear()
        size, count = 0, count + 1

    for name, tensor in weights:
        if size and size + tensor.nbytes > _BUCKET:
            flush()
        bucket[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    flush()


def write_adapter(matrices: Mapping[str, Tensor], rank: int) -> tempfile.TemporaryDirectory[str]:
    """Write the files that vLLM reads an adapter of a rank from; its scale is in B already."""
    from safetensors.torch import save_file

    targets = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in matrices})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    files = tempfile.TemporaryDirectory(prefix="covey-adapter-", dir=memory_directory())
    save_file(dict(matrices), Path(files.name) / "adapter_model.safetensors", metadata={"format": "pt"})
    (Path(files.name) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return files


def rank_of(matrices: Mapping[str, Tensor]) -> int:
    """Return the rank of an adapter: the rows of its A matrices."""
    return max((tensor.shape[0] for name, tensor in matrices.items() if ".lora_A." in name), default=0)
