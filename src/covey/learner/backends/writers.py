"""What a backend hands out to be written: each rank's part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.model_files import ModelFiles
from covey.learner.backends.base import ModelWriter
from covey.models.load import copy_text_files
from covey.models.lora import Adapter, save_adapter


def model_writer(files: ModelFiles, origin: Path, rank: int) -> ModelWriter:
    """Writes the rank's tensors, and on the first rank the tokenizer of `origin`."""

    def write(directory: Path) -> dict[str, FileEntry]:
        if rank == 0:
            copy_text_files(origin, directory)
        return files.write(directory)

    return write


def adapter_writer(
    adapter: Adapter, tensors: Mapping[str, Tensor], origin: Path, base: str | None, rank: int
) -> ModelWriter:
    """Writes an adapter on the first rank; it names `base` as its model, or `origin`."""

    def write(directory: Path) -> dict[str, FileEntry]:
        if rank == 0:
            save_adapter(adapter, tensors, directory, base=base or str(origin.absolute()))
            copy_text_files(origin, directory)
        return {}

    return write
